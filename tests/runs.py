"""What a run has left in its run_dir, as tests look at it."""

from __future__ import annotations

import contextlib
import json
import pathlib

import numpy as np


def manifests(run_dir: pathlib.Path, folder: str = "checkpoints") -> list[dict]:
    """Of all checkpoints that have one, the oldest first."""
    found = []
    for path in (run_dir / folder).glob("ckpt-*.manifest.json"):
        with contextlib.suppress(FileNotFoundError):  # a run that goes on removes its oldest
            found.append(json.loads(path.read_text()))
    return sorted(found, key=lambda manifest: manifest["serial"])


def steps(run_dir: pathlib.Path, folder: str = "checkpoints") -> list[int]:
    """Of all checkpoints that have a manifest, the oldest first."""
    return [manifest["step"] for manifest in manifests(run_dir, folder)]


def newest(run_dir: pathlib.Path) -> int:
    """The step of the newest checkpoint; 0 if there is none."""
    return max(steps(run_dir)[-1:], default=0)


def tensors(run_dir: pathlib.Path) -> dict[str, np.ndarray]:
    """Every variable of the newest checkpoint."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(run_dir / "checkpoints" / f"ckpt-{newest(run_dir)}"))
    names = [name for name in reader.get_variable_to_shape_map() if "VARIABLE_VALUE" in name]
    kept = [name for name in names if not name.startswith(("save_counter", "input/"))]  # what is read ahead varies
    return {name: reader.get_tensor(name) for name in kept}


def result(run_dir: pathlib.Path) -> dict:
    """What the run has left of its result."""
    return json.loads((run_dir / "result.json").read_text())


def metrics(run_dir: pathlib.Path, *splits: str) -> dict[str, dict[str, float]]:
    """The result's metrics, by split (train, eval)."""
    found = result(run_dir)
    return {split: found[split] for split in splits}


def assert_equal_bits(run_dir: pathlib.Path, other_dir: pathlib.Path, *splits: str) -> None:
    """Variables, slots, step, averages, loss scale: the same names, the same bytes; and the same metrics.

    `splits` are those to compare; both if none is given. Those of train are of a window, which ends with evaluations.
    """
    some, others = tensors(run_dir), tensors(other_dir)
    assert some.keys() == others.keys()
    assert len(some) > 8
    cpu, other_cpu = (manifests(folder)[-1]["about"].get("cpu") for folder in (run_dir, other_dir))
    assert cpu == other_cpu  # other threads, other bits
    assert [name for name in some if some[name].tobytes() != others[name].tobytes()] == []
    assert manifests(run_dir)[-1]["host_state"]["state"] == manifests(other_dir)[-1]["host_state"]["state"]
    splits = splits or ("train", "eval")
    assert metrics(run_dir, *splits) == metrics(other_dir, *splits)
