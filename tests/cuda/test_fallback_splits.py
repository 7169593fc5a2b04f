from tests.common.suites.fallback_splits import *  # noqa: F403
