from tests.common.suites.nn_norm import *  # noqa: F403
