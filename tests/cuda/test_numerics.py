from tests.common.suites.numerics import *  # noqa: F403
