"""Which GPUs a process takes: chosen from what there is, and where there is none the CPU computes."""

import pytest
import tensorflow as tf

from crankshaft.engine.errors import UsageError
from crankshaft.engine.machine import gpus

FOUND = [f"/physical_device:GPU:{number}" for number in range(3)]


@pytest.mark.parametrize(
    ("numbers", "chosen"),
    [(None, FOUND), ((), []), ((1,), FOUND[1:2]), ((2, 0), [FOUND[0], FOUND[2]])],
)
def test_gpus_are_chosen_by_number(numbers, chosen):
    assert gpus.choose(FOUND, numbers) == chosen


def test_a_number_that_no_gpu_has_is_named():
    with pytest.raises(UsageError) as failed:
        gpus.choose(FOUND, (0, 3))
    assert str(failed.value) == ("gpus=0,3: there is no GPU 3; TensorFlow finds 3, numbers 0 to 2; use those, or none")


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU")
def test_where_there_is_no_gpu_the_cpu_computes_and_a_line_says_so(caplog):
    with caplog.at_level("WARNING", logger="crankshaft"):
        gpus.use_only(None)
        gpus.use_only(())
        assert not caplog.records
        gpus.use_only((0,))
    gpus.make_deterministic()
    tf.timestamp()  # which raises where kernels are deterministic: CPUs' are as they are
    (record,) = caplog.records
    assert "GPU 0 is requested, but TensorFlow finds no GPU and uses the CPU" in record.getMessage()


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU")
def test_a_server_uses_what_the_process_has_taken():
    assert gpus.server_options().device_count["GPU"] == 0
