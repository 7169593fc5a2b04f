from tests.common.suites.voted_memory import *  # noqa: F403
