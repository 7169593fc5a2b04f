from tests.common.suites.bad_input import *  # noqa: F403
