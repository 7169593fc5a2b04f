from tests.common.suites.tracing import *  # noqa: F403
