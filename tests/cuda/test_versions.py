from tests.common.suites.versions import *  # noqa: F403
