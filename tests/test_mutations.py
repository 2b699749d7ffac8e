"""Files with some bytes changed, as by a disk or by whoever sent them: one line, or values, and never a crash.

Of formats with checksums it is one line or the same values; of the others the line, or what they say now. All are read
in this one process, which a parser that crashes would end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import pathlib
import random
import re
import signal
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.monitor_page import events, write
from crankshaft.engine.checkpoints import load_weights
from crankshaft.engine.checkpoints import manifest as manifests
from crankshaft.engine.errors import CrankshaftError
from crankshaft.input import array_record, csv, parquet, text, tfrecord
from crankshaft.input.files import idx, image_headers
from crankshaft.parts.dashboard import plan_file, result_text
from crankshaft.parts.dashboard.recorded_run import RecordedRun
from crankshaft.runner.results import SCHEMA
from crankshaft.runner.saved import keras_weights, model_file
from tests.engine.checkpoints import checkpoint_cases
from tests.input import test_array_record, test_csv, test_images, test_mnist_files, test_parquet, test_tfrecord
from tests.parts.dashboard.test_plan_file import PLAN
from tests.parts.dashboard.test_result_text import RESULT
from tests.runner.command_line.test_config import asked, checked
from tests.waiting import PATIENCE

pytestmark = pytest.mark.thorough

MUTATIONS = 12  # of each file
VALUES = [b"null", b"[]", b"{}", b"-1", b"1.5", b"true", b"1e300", b"1e999", b"9" * 5000, b'"x"', b'""']
VALUES += [b'[{"a": [1]}]', b'{"a": {"b": 1}}', b'"\\ud800"', b'"\\u001b[2J"', b"NaN", str(1 << 64).encode(), b'"../x"']
NUMBERS = [bytes(8), b"\xff" * 8, b"\xff" * 7 + b"\x7f", (1 << 62).to_bytes(8, "little"), (1 << 31).to_bytes(4, "big")]
TEXTS = [b"1e999", b"-1", b"null", b"[" * 3000, b'{"a":', b"9" * 5000, b"NaN", b"\0", b"\xff", b"\\ud800", b'"']


class Case(NamedTuple):
    """A file that is changed.

    Attributes:
      path: of the file.
      read: reads all of it; returns values.
      is_exact: whether it has checksums, so that other values are an error.
    """

    path: pathlib.Path
    read: Callable[[], Any]
    is_exact: bool = False


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Content with one to three changes, each of some bytes, or of a number, text or list in JSON."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        parts = [*re.finditer(rb'-?[0-9.]+|"[^"]*"|\[|\{|true', content)]
        if content.isascii() and parts and chance.random() < 0.7:
            part = chance.choice(parts)
            content = content[: part.start()] + chance.choice(VALUES) + content[part.end() :]
            continue
        at, size = chance.randrange(len(content) + 1), chance.choice((1, 1, 2, 4, 8, 64))
        new, end = chance.choice(
            [
                (chance.randbytes(size), at + size),  # other bytes
                (chance.choice(NUMBERS), at + 8),  # a length, or an offset
                (chance.choice(TEXTS), at + chance.choice((0, size))),
                (chance.randbytes(size), at),  # more bytes
                (b"", at + size),  # fewer
                (b"", len(content)),  # the end is missing
                (content[at : at + 8 * size] * 2, at + 8 * size),  # twice
            ]
        )
        content = content[:at] + new + content[end:]
    return content


RUN = ("--model=mlp", "--model_arg=hidden_units=4", "--input=synthetic", "--input_arg=examples=200", "--train_steps=4")
SAVED = pathlib.Path(__file__).parent / "launch" / "saved_runs" / "1.0.0" / "one_device"


def _run_file(name: str, read: Callable[[pathlib.Path], Any], content: bytes | None = None):
    """A case of one file of a run's folder."""

    def make(folder: pathlib.Path) -> Case:
        (folder / "logs").mkdir()
        (folder / "logs" / "worker-0.log").write_text("a line\n")
        (folder / "model.json").write_bytes((SAVED / "model.json").read_bytes())
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "ckpt-4.manifest.json").touch()
        write(folder / "events.jsonl", events(0, windows=30))
        (folder / "config.json").write_text(json.dumps(asked(*RUN).as_json()))
        path = folder / name
        path.write_bytes(content if content is not None else path.read_bytes())
        return Case(path, lambda: read(folder))

    return make


def _manifest(folder: pathlib.Path) -> Case:
    checkpoint_cases.saved(folder, [1])
    path = folder / "ckpt-1.manifest.json"
    return Case(path, lambda: dataclasses.asdict(manifests.read(str(path))), is_exact=True)


def _checkpoint(suffix: str):
    def make(folder: pathlib.Path) -> Case:
        state, _ = checkpoint_cases.saved(folder, [1])

        def read() -> list[bytes]:
            load_weights(folder, state.trainer.model)
            return checkpoint_cases.bits(state)

        return Case(folder / f"ckpt-1.{suffix}", read, is_exact=True)

    return make


def _weights(name: str):
    def make(folder: pathlib.Path) -> Case:
        model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(2)])
        path = folder / name
        model.save(path) if name.endswith(".keras") else model.save_weights(path)

        def read() -> None:
            keras_weights.load_keras_weights(str(path), model)

        return Case(path, read)

    return make


def _all_of(load: Callable[[], Any]) -> Callable[[], Any]:
    def read() -> Any:
        source = load().train
        return source.read(np.arange(len(source)))

    return read


def _tfrecord(name: str):
    """Returns a maker of TFRecord shards, whose index is rebuilt if it does not fit, or of the file beside them."""

    def make(folder: pathlib.Path) -> Case:
        pixels, labels = test_tfrecord.images(30, 1000)
        test_tfrecord.write(folder / "a.tfrecord", test_tfrecord.records_of(pixels, labels))
        described = {"image": {"shape": [4, 5], "dtype": "uint8"}, "label": {"shape": [], "dtype": "int64"}}
        (folder / "features.json").write_text(json.dumps({"features": described, "label": "label", "num_classes": 7}))
        read = _all_of(lambda: tfrecord.load(str(folder), 0))
        read()
        return Case(folder / name, read, is_exact=name != "features.json")

    return make


def _gzip(folder: pathlib.Path) -> Case:
    """What is packed in a shard of which the first records are read as it is opened."""
    path, packed = folder / "a.tfrecord", folder / "a.tfrecord.gz"
    test_tfrecord.write(path, test_tfrecord.records_of(*test_tfrecord.images(30, 1000)))
    plain = folder / "plain"
    path.rename(plain)

    def read() -> None:
        packed.write_bytes(gzip.compress(plain.read_bytes()))
        tfrecord.load(str(packed), 0, features=test_tfrecord.IMAGES)

    return Case(plain, read)


def _array_record(folder: pathlib.Path) -> Case:
    path = folder / "a.array_record"
    test_array_record.write(path, [test_tfrecord.example(x=bytes(range(200))) for _ in range(30)])
    (folder / "features.json").write_text('{"features": {"x": {"shape": [200], "dtype": "uint8"}}}')
    return Case(path, _all_of(lambda: array_record.load(str(folder), 0)))


def _parquet(folder: pathlib.Path) -> Case:
    how = {"row_group_size": 100, "write_page_checksum": True}
    path = pathlib.Path(test_parquet.written(folder, test_parquet.table(400), **how), "part-0.parquet")
    return Case(path, _all_of(lambda: parquet.load(str(folder), 0)))


def _csv(prepared: bool):
    def make(folder: pathlib.Path) -> Case:
        test_csv.written(folder, test_csv.HEADER + test_csv.records(0, 200))
        read = _all_of(lambda: csv.load(str(folder), 0))
        (path,) = map(pathlib.Path, csv.load(str(folder), 0).train.files()) if prepared else [folder / "0.csv"]
        return Case(path, read)

    return make


def _text(folder: pathlib.Path) -> Case:
    (folder / "0.txt").write_text("words of a text, and more. " * 200)
    (path,) = map(pathlib.Path, text.load(str(folder), 0, context=64).train.files())
    return Case(path, _all_of(lambda: text.load(str(folder), 0, context=64)))


def _idx(packed: bool):
    def make(folder: pathlib.Path) -> Case:
        path = folder / ("a.gz" if packed else "a")
        content = test_mnist_files.idx_bytes(np.arange(7 * 28 * 28).astype("uint8").reshape(7, 28, 28))
        path.write_bytes(gzip.compress(content) if packed else content)
        return Case(path, lambda: idx.read_idx(str(path), (None, 28, 28)))

    return make


def _image(encode: Callable[[int], bytes]):
    def make(folder: pathlib.Path) -> Case:
        path = test_images.write(folder / "a" / "1.png", encode(3))

        def read() -> Any:
            image_headers.read(path.read_bytes())
            source, only = test_images.loaded(folder).train, np.array([0])
            return source.verify(only, source.read(only))

        return Case(path, read)

    return make


FILES: dict[str, Callable[[pathlib.Path], Case]] = {
    "manifest": _manifest,
    "checkpoint": _checkpoint("data-00000-of-00001"),
    "checkpoint's index": _checkpoint("index"),
    ".keras": _weights("a.keras"),
    ".weights.h5": _weights("a.weights.h5"),
    "record": _run_file("events.jsonl", lambda folder: json.dumps(RecordedRun(str(folder)).shown(60))),
    "log": _run_file("logs/worker-0.log", lambda folder: json.dumps(RecordedRun(str(folder)).shown(60))),
    "config.json": _run_file("config.json", lambda folder: checked("--mode=eval", f"--run_dir={folder}")),
    "model.json": _run_file("model.json", lambda folder: model_file.read(str(folder))),
    "result.json": _run_file(
        "result.json",
        lambda folder: result_text.read(str(folder / "result.json")),
        json.dumps({"schema": SCHEMA, **RESULT}).encode(),
    ),
    "plan.json": _run_file(
        "plan.json", lambda folder: plan_file.read(str(folder / "plan.json")), json.dumps(PLAN).encode()
    ),
    "--config": _run_file(
        "flags.json",
        lambda folder: asked(f"--config={folder}/flags.json"),
        b'{"model": "mlp", "input": "digits", "train_epochs": 2.5, "model_arg": {"hidden_units": [3, 4]}}',
    ),
    "--config in YAML": _run_file(
        "flags.yaml",
        lambda folder: asked(f"--config={folder}/flags.yaml"),
        b"model: mlp\ninput: digits\nmodel_arg:\n  hidden_units: [3, 4]\n",
    ),
    "--flagfile": _run_file(
        "flags",
        lambda folder: asked(f"--flagfile={folder}/flags"),
        b"--model=mlp\n--input=digits\n--model_arg=hidden_units=3,4\n",
    ),
    "tfrecord": _tfrecord("a.tfrecord"),
    "tfrecord's index": _tfrecord("a.tfrecord.index"),
    "features.json": _tfrecord("features.json"),
    "tfrecord in gzip": _gzip,
    "array_record": _array_record,
    "parquet": _parquet,
    "csv": _csv(prepared=False),
    "csv, prepared": _csv(prepared=True),
    "text, prepared": _text,
    "idx": _idx(packed=False),
    "idx.gz": _idx(packed=True),
    "png": _image(test_images.png),
    "jpeg": _image(test_images.jpeg),
}


@contextlib.contextmanager
def no_longer_than(seconds: float) -> Iterator[None]:
    """Raises AssertionError in the body if that takes longer."""

    def raise_error(number: int, frame: Any) -> None:
        raise AssertionError(f"it takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, raise_error)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.holds("an input file", "Bytes that are changed")
@pytest.mark.parametrize("name", FILES)
def test_a_file_with_other_bytes_is_a_line_or_its_values(tmp_path, name):
    case = FILES[name](tmp_path)
    whole, expected, chance = case.path.read_bytes(), case.read(), random.Random(zlib.crc32(name.encode()))
    for number in range(MUTATIONS):
        content = mutated(whole, chance)
        case.path.write_bytes(content)
        try:
            with no_longer_than(PATIENCE):
                found = case.read()
        except CrankshaftError as error:
            line = str(error)
            assert line
            assert "\n" not in line, (number, line)
        else:
            if case.is_exact:
                tf.nest.map_structure(np.testing.assert_array_equal, found, expected)
