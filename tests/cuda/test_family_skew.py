from tests.common.suites.family_skew import *  # noqa: F403
