from tests.common.suites.explain import *  # noqa: F403
