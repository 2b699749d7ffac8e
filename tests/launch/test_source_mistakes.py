"""Each mistake in a source of one's own, and each fault of its files during a run, is one line, and no hang."""

from __future__ import annotations

import dataclasses
import os
import re
import threading

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.data.order import plain_order
from crankshaft.engine.data.reader import Reader, unmasked
from crankshaft.engine.data.source import Source, SourceSlice, Spec
from crankshaft.engine.errors import SourceError
from crankshaft.engine.hooks import every_steps
from crankshaft.input.files import storage
from tests.launch.conftest import assert_says
from tests.launch.line import FEATURES, LABELS, RUN, Line, location_of

TWO = ("--strategy=mirrored", "--num_virtual_devices=2")
STREAMED = ("--resident_data_mb=0",)


class Lines(Source):
    """The line's examples; a test changes what it gives."""

    element_spec = (Spec((1,), np.float32), Spec((), np.float32))

    def __init__(self, change=None, examples=32):
        self.change, self.examples = change, examples

    def __len__(self):
        return self.examples

    def read(self, indices):
        found = FEATURES[indices % 32], LABELS[indices % 32]
        return self.change(*found) if self.change else found


def _raise(*found):
    return {}["missing"]


SPEC = "and the source's spec has"
MISTAKES = {
    "too few": (lambda x, y: (x[:-1], y[:-1]), "Lines.read was called for 8 examples and returned 7 examples; return"),
    "too few of one part": (lambda x, y: (x, y[:1]), "Lines.read was called for 8 examples and returned 1 examples"),
    "one value": (lambda x, y: (x, y[0]), "Lines.read was called for 8 examples and returned a single value; return"),
    "another shape": (lambda x, y: (x[:, 0], y), f"Lines.read returned examples of shape [], {SPEC} [1]"),
    "another type": (lambda x, y: (x, y.astype("S4")), f"Lines.read returned |S4, {SPEC} float32"),
    "numbers that may not fit": (lambda x, y: (x, y.astype(np.int64)), f"Lines.read returned int64, {SPEC} float32"),
    "no labels": (lambda x, y: x, f"Lines.read returned one array, {SPEC} a tuple of 2; return an array"),
    "a list": (
        lambda x, y: ([*x], y),
        f"Lines.read returned a tuple of 2 (a list of 8, one array), {SPEC} a tuple of 2; return an array",
    ),
    "nothing": (lambda x, y: None, f"Lines.read returned a NoneType, {SPEC} a tuple of 2"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_read_otherwise_than_said_is_one_line(mistake):
    change, said = MISTAKES[mistake]
    source = SourceSlice(Lines(change), 4, 20)
    for chunk_examples in (1, 8):
        order = plain_order(source, 8, 1, 5, shuffle_window=0 if chunk_examples == 1 else 1)
        if chunk_examples > 1:
            order = dataclasses.replace(order, chunk_examples=chunk_examples)
        reader = Reader(source, order)
        zero = tf.zeros([], tf.int64)
        with pytest.raises(SourceError, match="^" + re.escape(said)), unmasked(reader):
            reader.read(order.examples(zero), zero)


ROUTES = {
    "streamed": STREAMED,
    "by chunks": (*STREAMED, "--shuffle_window=1"),
    "kept": (),
    "two replicas": (*STREAMED, *TWO),
}


@pytest.mark.parametrize("route", ROUTES)
def test_what_a_source_raises_ends_the_run_and_names_its_place(inside, route):
    outcome = inside(*RUN, *ROUTES[route], trainer=Line, data=lambda: (Lines(_raise), None))
    assert outcome.mistake.startswith(f"KeyError: 'missing', at {location_of(_raise)}")


def test_float64_is_rounded_and_smaller_types_are_taken(inside):
    inside(*RUN, trainer=Line, data=lambda: (Lines(lambda x, y: (x.astype(float), y.astype(np.float16))), None)).ok()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (lambda: Lines(examples=0), " has no examples; give at least one"),
        (lambda: Lines(examples=-1), "'s Lines.__len__: __len__() should return >= 0; return how many examples there"),
        (lambda: Lines(examples=1.5), "'s Lines.__len__: 'float' object cannot be interpreted as an integer; return"),
    ],
    ids=["none", "negative", "a fraction"],
)
def test_a_source_of_no_length_or_shape_is_one_line(inside, source, said):
    inside(*RUN, trainer=Line, data=lambda: (source(), None)).refused(f"the train data{said}")


class Hanging(Lines):
    """Never reads before the test ends."""

    over = threading.Event()

    def read(self, indices):
        self.over.wait()
        return super().read(indices)


SLOW = {"by chunks", "kept"}


@pytest.mark.parametrize("route", [pytest.param(r, marks=[pytest.mark.slow] if r in SLOW else []) for r in ROUTES])
def test_a_read_that_hangs_ends_the_run_and_names_its_place(inside, route):
    try:
        outcome = inside(*RUN, *ROUTES[route], "--step_timeout_seconds=2", trainer=Line, data=lambda: (Hanging(), None))
    finally:
        Hanging.over.set()
        Hanging.over = threading.Event()
    assert outcome.code == 1, "it may go well the next time"
    assert outcome.error.startswith("Hanging.read has not returned for ")
    assert_says(outcome.error, f"{location_of(Hanging.read)}, from example  ... or raise step_timeout_seconds")


class Kept(Source):
    """A file of records of two float32 each."""

    element_spec = Lines.element_spec

    def __init__(self, path):
        self._files = storage.Files([str(path)])

    def __len__(self):
        return self._files.sizes[0] // 8

    def read(self, indices):
        records = b"".join(self._files.pread(0, int(at) * 8, 8) for at in indices)
        found = np.frombuffer(records, np.float32).reshape(-1, 2)
        return found[:, :1], found[:, 1]


def _fifo(path):
    os.remove(path)
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("flags", "change", "said"),
    [
        ((), os.remove, "can't be read (No such file or directory) ... (it was there as the run began)"),
        (TWO, lambda path: os.truncate(path, 64), "has 64 bytes, and had 256 as the run began; let files be as they"),
        ((), _fifo, "is not a regular file; give files, not folders ... (it was there as the run began)"),
    ],
)
def test_a_file_that_changes_while_a_run_reads_it_ends_the_run(inside, tmp_path, flags, change, said):
    path = tmp_path / "records"
    path.write_bytes(np.stack([FEATURES[:, 0], LABELS], 1).tobytes())

    def change_it(status, means):
        if status.step == 2:
            change(path)

    outcome = inside(
        *("--train_steps=1000000", "--global_batch_size=8", "--jit=off", "--progress=plain", *STREAMED, *flags),
        *(f"--run_dir={tmp_path}/run",),
        trainer=Line,
        data=lambda: (Kept(path), None),
        hooks=[every_steps(2, change_it)],
    )
    outcome.refused(f"{path} {said}")


STREAM = """
import crankshaft
import tensorflow as tf
from tests.launch.line import Line

FIFO = __file__.replace("script.py", "fifo")  # nobody writes to it
lines = tf.data.TextLineDataset(FIFO).map(lambda line: (tf.zeros([1]), tf.strings.to_number(line)))
crankshaft.main(Line, data=lambda: (lines.apply(tf.data.experimental.assert_cardinality(32)), None))
"""


@pytest.mark.slow
def test_a_stream_that_hangs_ends_the_process(crank, tmp_path):
    """Its own, as TensorFlow's threads wait for ever."""
    (tmp_path / "script.py").write_text(STREAM)
    os.mkfifo(tmp_path / "fifo")
    outcome = crank(*RUN, "--step_timeout_seconds=4", script=tmp_path / "script.py")
    assert outcome.code == 1
    assert re.match(r"the data is a stream without data or computation for 2\S* s; see", outcome.error)
