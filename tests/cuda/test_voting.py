from tests.common.suites.voting import *  # noqa: F403
