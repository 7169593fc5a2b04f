from tests.common.suites.failure import *  # noqa: F403
