"""`benchmarks/bits.py --compare`: what it says of two files. No TensorFlow."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

BITS = Path(__file__).resolve().parents[2] / "benchmarks" / "bits.py"
FOUND = {
    "commit": "a" * 40,
    "cpu": "a CPU",
    "python": "3.12.1",
    "tensorflow": "2.21.0",
    "cases": {
        "mlp/one_device": {"command": "train", "values": {"model/kernel": "01", "model/bias": "02"}},
        "mlp/workers": {"command": "local", "values": {"model/kernel": "03"}},
    },
}


def compare(folder: Path, change) -> tuple[int, list[str]]:
    """Exit status and lines of a comparison of what was found with the same after `change`."""
    after = copy.deepcopy(FOUND)
    change(after)
    paths = [folder / "before.json", folder / "after.json"]
    for path, found in zip(paths, (FOUND, after), strict=True):
        path.write_text(json.dumps(found), encoding="utf-8")
    done = subprocess.run([sys.executable, BITS, "--compare", *paths], capture_output=True, text=True)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def test_same_bits_end_with_0(tmp_path):
    status, lines = compare(tmp_path, lambda after: after.update(commit="b" * 40))
    assert (status, lines) == (0, ["2 of 2 cases have the same bits in aaaaaaaaa and bbbbbbbbb"])


def test_a_case_that_one_file_lacks_is_not_compared_but_told(tmp_path):
    status, lines = compare(tmp_path, lambda after: after["cases"].pop("mlp/workers"))
    assert (status, lines) == (
        0,
        ["1 of 1 cases have the same bits in aaaaaaaaa and aaaaaaaaa; 1 are in one file alone"],
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda values: values.update({"model/bias": "04"}), "1 of 2 differ: model/bias"),
        (lambda values: values.pop("model/bias"), "1 gone: model/bias"),
        (lambda values: values.update(step="05"), "1 added: step"),
        (
            lambda values: values.update({"bias": values.pop("model/bias")}),
            "same bits, 1 under other names: model/bias -> bias",
        ),
        (
            lambda values: values.update({"bias": values.pop("model/bias"), "model/kernel": "04"}),
            "1 of 2 differ: model/kernel; 1 gone: model/bias; 1 added: bias",
        ),
    ],
    ids=["other bits", "gone", "added", "renamed", "renamed and other bits"],
)
def test_what_differs_is_a_line_and_ends_with_1(tmp_path, change, told):
    status, lines = compare(tmp_path, lambda after: change(after["cases"]["mlp/one_device"]["values"]))
    assert (status, lines[0]) == (1, f"mlp/one_device: {told}")
    assert lines[1].startswith("1 of 2 cases")


def test_a_case_that_failed_differs(tmp_path):
    status, lines = compare(tmp_path, lambda after: after["cases"].update({"mlp/workers": {"error": "one\nlast"}}))
    assert (status, lines[0]) == (1, "mlp/workers: failed after: last")


def test_another_machine_is_not_compared(tmp_path):
    status, lines = compare(tmp_path, lambda after: after.update(cpu="another CPU"))
    assert (status, lines) == (1, ["not comparable: cpu was a CPU and is another CPU"])


def test_nothing_in_common_ends_with_1(tmp_path):
    status, _ = compare(tmp_path, lambda after: after.update(cases={}))
    assert status == 1
