from tests.common.suites.forms import *  # noqa: F403
