"""What an engine's error says to whoever started the run."""

from crankshaft.engine.checkpoints import CheckpointError
from crankshaft.launch.command_line import flags  # noqa: F401 - defines them
from crankshaft.launch.errors import EXIT_USAGE
from crankshaft.launch.host import explanations


def test_parameters_that_an_engine_error_names_are_told_as_flags():
    error = CheckpointError("ckpt-1 is of another model; use another `run_dir`, or `self.model`, or `no_flag`")
    line = "ckpt-1 is of another model; use another --run_dir, or `self.model`, or `no_flag`"
    assert explanations.explain(error) == (EXIT_USAGE, line)


def test_what_a_user_writes_in_backquotes_stays():
    assert "`seed` is mine" in explanations.explain(ValueError("`seed` is mine"))[1]
