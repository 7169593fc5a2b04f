from tests.common.suites.fuzz import *  # noqa: F403
