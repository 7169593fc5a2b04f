from tests.common.suites.norm_numerics import *  # noqa: F403
