from tests.common.suites.skew import *  # noqa: F403
