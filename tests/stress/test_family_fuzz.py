from tests.common.suites.family_fuzz import *  # noqa: F403
