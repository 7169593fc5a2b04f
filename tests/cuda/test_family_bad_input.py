from tests.common.suites.family_bad_input import *  # noqa: F403
