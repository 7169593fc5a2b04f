from tests.common.suites.pairs import *  # noqa: F403
