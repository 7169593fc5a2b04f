from tests.common.suites.pool import *  # noqa: F403
