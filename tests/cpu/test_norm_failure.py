from tests.common.suites.norm_failure import *  # noqa: F403
