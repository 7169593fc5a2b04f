from tests.common.suites.norm_bad_input import *  # noqa: F403
