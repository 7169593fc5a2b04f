from tests.common.suites.gradients import *  # noqa: F403
