from tests.common.suites.mismatch import *  # noqa: F403
