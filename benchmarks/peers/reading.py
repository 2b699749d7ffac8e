"""Batches that are read and used for nothing, by one way of reading: a peer that takes turns (`peer.py`).

`python -m benchmarks.peers.reading --way=crankshaft --folder=F -- --input=tfrecord ...`, flags of `crankshaft train`
after the dashes. `--cold` drops the files' pages before each piece.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence

from crankshaft.engine.machine.files import open_regular

from ..peer import take_turns

BATCH, SHUFFLE = 64, 10_000
TOKENS, TEXT_BATCH = 256, 32
SIZE = 224
_PIECE_BYTES = 8 << 20


def crankshaft(folder: str, flags: list[str]) -> Callable[[int], None]:
    """Reads as a run does, by the part of its step that is input."""
    from .. import bare, parts

    bare.tune()
    run_dir = tempfile.mkdtemp(prefix="crankshaft-reading-")
    atexit.register(shutil.rmtree, run_dir, ignore_errors=True)
    made = bare.make(run_dir, "--model=logistic", "--jit=off", "--resident_data_mb=0", *flags)
    program = parts.input(made.strategy, made.state, made.strategy.training.feed, False)
    return lambda steps: bare.rate(made, steps, program) and None


def tf_data(make: Callable) -> Callable:
    """Returns a way that goes through a `tf.data.Dataset` in a compiled loop."""

    def way(folder: str, flags: list[str]) -> Callable[[int], None]:
        del flags
        import tensorflow as tf

        batches = iter(make(tf, folder))

        @tf.function
        def read_batches(steps):
            for _ in tf.range(steps):
                next(batches)

        return lambda steps: read_batches(tf.constant(steps))

    return way


def _records(tf, folder: str):
    files = tf.data.Dataset.list_files(f"{folder}/*.tfrecord", shuffle=True)
    read = files.interleave(tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)
    return read.shuffle(SHUFFLE).repeat()


def _parse(tf) -> Callable:
    spec = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}

    def parse(records):
        features = tf.io.parse_example(records, spec)
        return tf.reshape(tf.io.decode_raw(features["image"], tf.uint8), [-1, 28, 28, 1]), features["label"]

    return parse


def guide(tf, folder: str):
    """The pipeline that TensorFlow's guide to tf.data performance advises."""
    parsed = _records(tf, folder).batch(BATCH).map(_parse(tf), num_parallel_calls=tf.data.AUTOTUNE)
    return parsed.prefetch(tf.data.AUTOTUNE)


def hundred(tf, folder: str):
    """The same, parsed a hundred batches at once."""
    parsed = _records(tf, folder).batch(100 * BATCH).map(_parse(tf), num_parallel_calls=tf.data.AUTOTUNE)
    return parsed.rebatch(BATCH).prefetch(tf.data.AUTOTUNE)


def images(tf, folder: str, transform: str = ""):
    """Files of images, decoded within a random crop, resized, flipped; by a transform of JPEG's other than the fast."""
    paths = sorted(glob.glob(f"{folder}/*/*.jpg"))

    def decode(path):
        content = tf.io.read_file(path)
        shape = tf.io.extract_jpeg_shape(content)
        box = tf.zeros([1, 0, 4])
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            shape, box, area_range=(0.08, 1.0), aspect_ratio_range=(3 / 4, 4 / 3), use_image_if_no_bounding_boxes=True
        )
        window = tf.stack([begin[0], begin[1], size[0], size[1]])
        image = tf.image.decode_and_crop_jpeg(content, window, channels=3, dct_method=transform)
        return tf.image.random_flip_left_right(tf.image.resize(image, [SIZE, SIZE])) / 255.0, 0

    data = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths)).repeat()
    return data.map(decode, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH).prefetch(tf.data.AUTOTUNE)


def windows(tf, folder: str):
    """Records that are windows of tokens, and the one after them."""

    def parse(records):
        rows = tf.cast(tf.io.decode_raw(records, tf.uint16, fixed_length=2 * TOKENS + 2), tf.int32)
        return rows[:, :-1], rows[:, 1:]

    batches = _records(tf, folder).batch(TEXT_BATCH).map(parse, num_parallel_calls=tf.data.AUTOTUNE)
    return batches.prefetch(tf.data.AUTOTUNE)


def grain(folder: str, flags: list[str]) -> Callable[[int], None]:
    """Reads ArrayRecords by PyPI grain's DataLoader; `flags` are the number of its workers."""
    import grain.python as pygrain
    import numpy as np
    import tensorflow as tf

    class Parse(pygrain.MapTransform):
        def map(self, record):
            features = tf.train.Example.FromString(record).features.feature["image"].bytes_list.value[0]
            return np.frombuffer(features, np.uint8)

    source = pygrain.ArrayRecordDataSource(sorted(glob.glob(f"{folder}/*.array_record")))
    sampler = pygrain.IndexSampler(len(source), pygrain.NoSharding(), shuffle=True, num_epochs=None, seed=0)
    loader = pygrain.DataLoader(
        data_source=source,
        sampler=sampler,
        operations=[Parse(), pygrain.Batch(BATCH)],
        worker_count=int(flags[0]),
    )
    batches = iter(loader)

    def read_batches(steps: int) -> None:
        for _ in range(steps):
            next(batches)

    return read_batches


def end_to_end(folder: str, flags: list[str]) -> Callable[[int], None]:
    """Reads all files once from end to end, however many steps that is said to be."""
    del flags
    return lambda steps: read_through(_files(folder))


WAYS: dict[str, Callable[[str, list[str]], Callable[[int], None]]] = {
    "crankshaft": crankshaft,
    "guide": tf_data(guide),
    "hundred": tf_data(hundred),
    "images": tf_data(images),
    "images_accurate": tf_data(functools.partial(images, transform="INTEGER_ACCURATE")),
    "windows": tf_data(windows),
    "grain": grain,
    "end_to_end": end_to_end,
}


def _files(folder: str) -> list[str]:
    return [path for path in sorted(glob.glob(f"{folder}/**/*", recursive=True)) if os.path.isfile(path)]


def drop(paths: Sequence[str]) -> None:
    """Has the system forget the pages of files; those that another process maps stay."""
    for path in paths:
        descriptor = open_regular(path)
        try:
            os.fsync(descriptor)  # what is not written yet can't be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_through(paths: Sequence[str]) -> None:
    """Reads files from end to end, in large pieces."""
    piece = bytearray(_PIECE_BYTES)
    for path in paths:
        descriptor = open_regular(path)
        try:
            while os.readv(descriptor, [piece]):
                pass
        finally:
            os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="steps by seconds of this process's CPU time")
    parser.add_argument("--times", type=int, default=1, help="factor on the requested steps")
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    read_batches = WAYS[args.way](args.folder, args.flags)

    # What is read ahead while others work costs CPU time all the same.
    cpu_before = time.process_time()

    def rate(steps: int) -> float:
        nonlocal cpu_before
        if args.cold:
            drop(_files(args.folder))
        began = time.perf_counter()
        steps *= args.times
        read_batches(steps)
        seconds, cpu_now = time.perf_counter() - began, time.process_time()
        cpu_seconds, cpu_before = cpu_now - cpu_before, cpu_now
        return steps / (cpu_seconds if args.cpu else seconds)

    take_turns(rate)


if __name__ == "__main__":
    main()
