"""What tests here share stands beside those of launch."""

from tests.launch.conftest import *  # noqa: F403
from tests.launch.conftest import _finished_runs  # noqa: F401
