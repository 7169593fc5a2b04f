from tests.common.suites.family_numerics import *  # noqa: F403
