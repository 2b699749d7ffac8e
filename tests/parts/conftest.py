"""What tests here share stands beside those of engine and of launch."""

from tests.bench import _compiled, _float32_policy, bench, compiled, distribution  # noqa: F401
from tests.launch.conftest import *  # noqa: F403
from tests.launch.conftest import _finished_runs  # noqa: F401
