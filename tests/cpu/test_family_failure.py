from tests.common.suites.family_failure import *  # noqa: F403
