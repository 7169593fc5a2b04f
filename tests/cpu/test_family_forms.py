from tests.common.suites.family_forms import *  # noqa: F403
