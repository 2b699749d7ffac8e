"""Runs on each kind of data, again and again, in one process; prints what each leaves: FOLDER RUNS."""

import contextlib
import gc
import json
import os
import pathlib
import shutil
import sys
import threading
import time

import numpy as np
import pyarrow
import tensorflow as tf
from pyarrow import parquet

from crankshaft import run
from crankshaft.engine.data.source import Source, Spec
from crankshaft.launch import prepare

PATIENCE = 20.0  # seconds
RUN = {"model": "logistic", "train_steps": 2, "global_batch_size": 16, "resident_data_mb": 0, "jit": "off"}


def shards(folder: pathlib.Path, form: str) -> str:
    """Writes shards of 64 examples of 3 numbers in two classes, and returns their folder."""
    asked = ["--input=synthetic", *(f"--input_arg={arg}" for arg in ("shape=3", "classes=2", "examples=64"))]
    asked += ["--input_arg=eval_examples=8", f"--format={form}", f"--output_dir={folder / form}", "--processes=1"]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
        prepare.main(argv=["prepare", *asked])
    return str(folder / form)


def compressed(folder: pathlib.Path) -> str:
    """Writes the TFRecords again as a gzip file, and returns its path."""
    path = str(folder / "all.tfrecord.gz")
    with tf.io.TFRecordWriter(path, "GZIP") as writer:
        for record in tf.data.TFRecordDataset(sorted(map(str, (folder / "tfrecord").glob("train/*.tfrecord")))):
            writer.write(record.numpy())
    shutil.copy(folder / "tfrecord" / "features.json", folder / "features.json")
    return path


class Points(Source):
    """A source of one's own."""

    element_spec = (Spec((3,), np.float32), Spec((), np.int32))

    def __len__(self):
        return 64

    def read(self, indices, at=None):
        return np.ones((len(indices), 3), np.float32), np.asarray(indices, np.int32) % 2


def kinds(folder: pathlib.Path):
    """Writes files, and returns the arguments of a run on each kind."""
    arrays = np.zeros((64, 3), np.float32), np.zeros(64, np.int32)
    rows = "".join(f"{i % 7},{i % 5},{i % 2}\n" for i in range(64))
    (folder / "train.csv").write_text(f"a,b,label\n{rows}")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("the cat sat on the mat. " * 40)
    for i in range(16):
        (folder / "images" / str(i % 2)).mkdir(parents=True, exist_ok=True)
        picture = tf.io.encode_jpeg(np.full((9, 9, 3), i, np.uint8)).numpy()
        (folder / "images" / str(i % 2) / f"{i}.jpg").write_bytes(picture)
    columns = {"a": np.arange(64) % 7 / 7, "word": np.where(np.arange(64) % 2, "x", "y"), "label": np.arange(64) % 2}
    parquet.write_table(pyarrow.table(columns), folder / "train.parquet")
    np.save(folder / "x.npy", arrays[0])
    mapped = np.load(folder / "x.npy", mmap_mode="r")
    small = {"model": "transformer_lm", "model_arg": {"layers": 1, "width": 8, "heads": 1}}
    tables = {"model": "wide_deep", "model_arg": {"hidden_units": 4}}
    found = {
        "arrays": {"data": lambda: (arrays, None, 2), "resident_data_mb": 100},
        "dataset": {"data": lambda: (tf.data.Dataset.from_tensor_slices(arrays), None, 2)},
        "source": {"data": lambda: (Points(), None, 2)},
        "mapped": {"data": lambda: ((mapped, arrays[1]), None, 2)},
        "csv": {"input": "csv", "data_dir": str(folder / "train.csv"), "input_arg": {"array": True}},
        "parquet": {"input": "parquet", "data_dir": str(folder / "train.parquet"), **tables},
        "text": {"input": "text", "data_dir": str(folder / "text"), "input_arg": {"context": 8}, **small},
        "images": {"input": "images", "data_dir": str(folder / "images"), "input_arg": {"size": 8}},
    }
    for form in ("tfrecord", "array_record"):
        found[form] = {"input": form, "data_dir": shards(folder, form)}
    found["gzip"] = {"input": "tfrecord", "data_dir": compressed(folder), "input_arg": {"num_classes": 2}}
    return found


def left_open(before: tuple[int, int] | None) -> tuple[int, int]:
    """Counts threads and descriptors; waits for those above `before`, or a while, for threads that are about to end."""
    deadline = time.monotonic() + (1 if before is None else PATIENCE)
    while True:
        gc.collect()
        counts = threading.active_count(), len(os.listdir("/proc/self/fd"))
        few = before is not None and all(now <= then for now, then in zip(counts, before, strict=True))
        if few or time.monotonic() > deadline:
            return counts
        time.sleep(0.1)


def main(folder: pathlib.Path, runs: int) -> None:
    """Runs each kind so often; prints what is open after each run as JSON."""
    found: dict[str, list] = {}
    for name, arguments in kinds(folder).items():
        for _ in range(runs):
            run(**{**RUN, **arguments}, progress="off")
            counts = found.setdefault(name, [])
            counts.append(left_open(counts[0] if counts else None))
    print(json.dumps(found))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
