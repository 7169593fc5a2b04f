from tests.common.suites.lifecycle import *  # noqa: F403
