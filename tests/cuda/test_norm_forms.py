from tests.common.suites.norm_forms import *  # noqa: F403
