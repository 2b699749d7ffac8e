"""Two workers, one with files that are damaged or no longer answer: it reports one line, and the other ends too."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest

from tests.launch.line import FEATURES, LABELS

# Each worker has a copy of its own. The second one's comes to grief when it has been read from for a while.
SCRIPT = """
import json, os, pathlib, threading
import numpy as np
from crankshaft.engine.data.source import Source, Spec
from crankshaft.input.files import storage
from crankshaft.launch import train
from tests.launch.line import Line

WORKER = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
PATH = pathlib.Path(__file__).with_name(f"records-{WORKER}")

class Records(Source):
    element_spec = (Spec((1,), np.float32), Spec((), np.float32))
    reads = 0

    def __init__(self):
        self._files = storage.Files([str(PATH)])

    def __len__(self):
        return 32

    def identity(self):
        return PATH.name

    def read(self, indices):
        self.reads += 1
        if WORKER and self.reads == 20:
            FAULT
        rows = np.stack([np.frombuffer(self._files.pread(0, int(at) * 8, 8), np.float32) for at in indices])
        return rows[:, :1], rows[:, 1]

train.main(Line, data=lambda: (Records(), None))
"""


@pytest.fixture
def outputs(start_workers, tmp_path):
    """`outputs(fault, *flags)`: the exit codes and the outputs of both workers, which have ended by themselves."""

    def run(fault: str, *flags: str) -> tuple[list[int], list[str]]:
        for worker in range(2):
            path = tmp_path / f"records-{worker}"
            path.write_bytes(np.stack([FEATURES[:, 0], LABELS], 1).tobytes())
        script = tmp_path / "records.py"
        script.write_text(textwrap.dedent(SCRIPT).replace("FAULT", fault))
        common = ("--strategy=multi_worker", "--train_steps=1000000", "--global_batch_size=8", "--resident_data_mb=0")
        workers = start_workers(2, script, *common, "--steps_per_loop=2", "--jit=off", "--progress=plain", *flags)
        return workers.wait(), [workers.output(worker) for worker in range(2)]

    return run


def errors(output: str) -> list[str]:
    return [line.removeprefix("error: ") for line in output.splitlines() if line.startswith("error: ")]


@pytest.mark.slow
def test_a_damaged_file_of_one_worker_ends_both(outputs, tmp_path):
    codes, (first, second) = outputs("os.truncate(PATH, 64)")
    assert codes[1] == 2
    assert codes[0] != 0
    assert len(errors(second)) == 1
    assert errors(second)[0].startswith(
        f"{tmp_path}/records-1 has 64 bytes, and had 256 as the run began; let files be"
    )
    assert len(errors(first)) == 1
    assert "records-1 has 64 bytes" in errors(first)[0], "the other says why its peer has gone"
    # What each has says that it is another file: they are warned of it, once, and train.
    assert ["workers have as many examples, of other contents" in output for output in (first, second)] == [True, False]
    assert "Traceback" not in first + second
