from tests.common.suites.process_group import *  # noqa: F403
