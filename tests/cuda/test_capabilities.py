from tests.common.suites.capabilities import *  # noqa: F403
