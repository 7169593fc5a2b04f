from tests.common.suites.norm_skew import *  # noqa: F403
