"""How fast files are read, beside tf.data, grain and memory, by programs that take turns: a row of a table each.

    python -m benchmarks.reading --rows=records,layout,cold,array_record,images,text,mlp,cnn,memory,resume

Steps are batches of 64 (text: 32). All peers read the same files, made for each run, and do nothing with a
batch, but for `mlp` and `cnn`, which train. Ratios are medians of turns, with the interval that 95 % of such medians
lie in.
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from crankshaft.parts.launchers.children import Children

from . import rounds
from .processes import ROOT, Process, run_script

PEER = "-m", "benchmarks.peers.reading"
EXAMPLES, COLD_EXAMPLES, PICTURES, WINDOWS, BATCH = 60_000, 120_000, 512, 20_000, 64
LONG = 120_000_000  # records of an index
RESUMED_AT = 100_000_000
MORE: list[str] = []  # flags of all peers that read
READ = 64_000  # examples
FEATURES = ("--input_arg=features=image:uint8:28x28x1,label:int64", "--input_arg=num_classes=10")


def peer(way: str, folder: str, *flags: str, cold: bool = False, times: int = 1) -> Process:
    more = [f"--times={times}", *(["--cold"] if cold else []), *MORE]
    return Process([sys.executable, *PEER, f"--way={way}", f"--folder={folder}", *more, "--", *flags])


def ours(folder: str, *flags: str, cold: bool = False, times: int = 1) -> Process:
    flags = (f"--data_dir={folder}", f"--global_batch_size={BATCH}", *flags)
    return peer("crankshaft", folder, *flags, cold=cold, times=times)


def compare(title: str, processes: dict[str, Process], steps: int, turns: int) -> None:
    """Measures pieces of so many steps in turn, and prints the last one beside each other."""
    *others, ours = processes
    with rounds.residents(processes, dict.fromkeys(processes, BATCH), steps=steps, folder=ROOT) as peers:
        measured = rounds.measure(title, peers, turns)
    print(rounds.speed_table([(measured, [(ours, {other: other for other in others})])]))


# -- Rows -------------------------------------------------------------------------------------------------------------


def records(folder: str, turns: int) -> None:
    write_records(folder, EXAMPLES, varied=True)
    peers = {"tf.data, as its guide advises": peer("guide", folder)}
    peers["tf.data, 100 batches parsed at once"] = peer("hundred", folder)
    peers["crankshaft, indexed"] = ours(folder, "--input=tfrecord", *FEATURES)
    compare("records of several lengths, warm", peers, 5000, turns)


def layout(folder: str, turns: int) -> None:
    write_records(folder, EXAMPLES)
    peers = {"tf.data, as its guide advises": peer("guide", folder)}
    peers["tf.data, 100 batches parsed at once"] = peer("hundred", folder)
    peers["crankshaft, indexed"] = ours(folder, "--input=tfrecord", *FEATURES)
    compare("records of one layout, warm", peers, 5000, turns)


def cold(folder: str, turns: int) -> None:
    write_records(folder, COLD_EXAMPLES)
    peers = {"files from end to end": peer("end_to_end", folder, cold=True)}
    peers["crankshaft, by chunks"] = ours(folder, "--input=tfrecord", *FEATURES, "--shuffle_window=16", cold=True)
    compare("records, cold: all of them once", peers, COLD_EXAMPLES // BATCH, turns)


def array_record(folder: str, turns: int) -> None:
    grouped, single = os.path.join(folder, "grouped"), os.path.join(folder, "single")
    for made, group in ((grouped, 64), (single, 1)):  # grain wants records that stand alone
        os.mkdir(made)
        write_records(made, EXAMPLES, group=group)
    peers = {f"grain, {n} workers": peer("grain", single, str(n)) for n in (0, 1, 2)}
    # Of fewer steps it would show what it has read ahead while the others work; and few chunks are kept, so it reads.
    peers["crankshaft, by chunks"] = ours(grouped, "--input=array_record", *FEATURES, "--shuffle_window=8", times=50)
    compare("array_record, warm", peers, 100, turns)


def images(folder: str, turns: int) -> None:
    write_pictures(folder)
    peers = {"tf.data, as its guide advises": peer("images", folder)}
    peers["tf.data, by the accurate transform"] = peer("images_accurate", folder)
    peers["crankshaft"] = ours(folder, "--input=images")
    compare("JPEGs to 224x224, crop and flip", peers, 32, turns)


def text(folder: str, turns: int) -> None:
    write_text(folder)
    flags = (f"--data_dir={folder}/text", "--input=text", "--global_batch_size=32")
    peers = {"tf.data over TFRecords of windows": peer("windows", folder)}
    peers["crankshaft"] = peer("crankshaft", folder, *flags)
    compare("windows of 256 tokens", peers, 5000, turns)


def training(model: str, steps: int) -> Callable[[str, int], None]:
    def row(folder: str, turns: int) -> None:
        write_records(folder, EXAMPLES)
        common = [f"--model={model}", f"--data_dir={folder}", f"--global_batch_size={BATCH}", "--jit=off"]
        common += ["--input=tfrecord", *FEATURES]
        bare = [sys.executable, "-m", "benchmarks.bare", *common]
        peers = {"from memory, as it comes": Process(bare), "from files": Process([*bare, "--resident_data_mb=0"])}
        compare(f"{model}, training", peers, steps, turns)

    return row


def memory(folder: str, turns: int) -> None:
    """Prints the resident memory after as many reads, of ten times the data too."""
    del turns
    for times in (1, 10):
        data = os.path.join(folder, f"times_{times}")
        os.mkdir(data)
        write_records(data, EXAMPLES)
        for copy in range(1, times):
            for path in glob.glob(f"{data}/first-*.tfrecord"):
                shutil.copy(path, path.replace("first", f"copy-{copy}"))
        process = ours(data, "--input=tfrecord", *FEATURES)
        with Children() as children:  # it has nothing to write, and is killed
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            running = children.start(process.command, env=os.environ, cwd=ROOT, **pipes)
            running.stdout.readline()
            running.stdin.write(b"%d\n" % (READ // BATCH))
            running.stdout.readline()
            status = Path(f"/proc/{running.pid}/status").read_text(encoding="utf-8")
        kib = int(re.search(r"VmRSS:\s+(\d+)", status)[1])
        print(f"{times * EXAMPLES:,} examples: {kib / 1024:,.0f} MiB resident after {READ:,} reads", flush=True)


def resume(folder: str, turns: int) -> None:
    """Prints the time to the first batch of a source with a long index, at its beginning and far in."""
    import tensorflow as tf

    from crankshaft import Source, Spec
    from crankshaft.engine.strategies import FeedOptions, StrategyOptions
    from crankshaft.engine.strategies.replicated import Replicated
    from crankshaft.input.records import record_index

    shard = os.path.join(folder, "long.tfrecord")
    lengths = np.full(LONG, 800, np.int64)
    lengths[::2] = 801  # so that they are kept one by one
    with open(shard, "wb") as file:
        file.truncate(int(lengths.sum()) + 16 * LONG)  # of holes: only the index is read
    size = os.path.getsize(shard)
    with open(shard, "rb") as file:
        ends = record_index.checksum_of_ends(lambda offset, n: os.pread(file.fileno(), n, offset), size)
    record_index.write(shard, size, ends, lengths)
    del lengths

    class Long(Source):
        element_spec = (Spec((2,), np.int64),)

        def __init__(self):
            self._index = record_index.open_index([shard])

        def __len__(self):
            return len(self._index)

        def read(self, indices):
            return (np.stack(self._index.find(0, indices), 1),)

    for step in (0, RESUMED_AT // BATCH):
        seconds = []
        for _ in range(turns):
            began = time.perf_counter()
            options = StrategyOptions(feed_options=FeedOptions(resident_bytes=0))
            strategy = Replicated("resume", tf.distribute.OneDeviceStrategy("CPU:0"), options)
            strategy.feed(Long(), BATCH, 1).call_input(step, 1)
            seconds.append(time.perf_counter() - began)
        print(f"first batch at example {step * BATCH:,} of {LONG:,}: {np.median(seconds):.2f} s", flush=True)


ROWS: dict[str, Callable[[str, int], None]] = {
    "records": records,
    "layout": layout,
    "cold": cold,
    "array_record": array_record,
    "images": images,
    "text": text,
    "mlp": training("mlp", 3000),
    "cnn": training("cnn", 300),
    "memory": memory,
    "resume": resume,
}


# -- Files ------------------------------------------------------------------------------------------------------------


def write_records(folder: str, examples: int, varied: bool = False, group: int = 0) -> None:
    """Writes pictures of 28x28 bytes with a label into four shards; `varied` ones have a name too, of any length.

    With a `group` of records they are ArrayRecords.
    """
    import tensorflow as tf

    random = np.random.default_rng(0)
    for shard in range(4):
        path = os.path.join(folder, f"first-{shard}.{'array_record' if group else 'tfrecord'}")
        with _writer(tf, path, group) as write:
            for number in range(examples // 4):
                feature = {
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[random.bytes(784)])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[number % 10])),
                }
                if varied:
                    name = b"x" * (number % 37)
                    feature["name"] = tf.train.Feature(bytes_list=tf.train.BytesList(value=[name]))
                example = tf.train.Example(features=tf.train.Features(feature=feature))
                write.write(example.SerializeToString(deterministic=True))


def _writer(tf, path: str, group: int):
    if not group:
        return tf.io.TFRecordWriter(path)
    import contextlib

    from array_record.python import array_record_module

    return contextlib.closing(array_record_module.ArrayRecordWriter(path, f"group_size:{group}"))


def write_pictures(folder: str) -> None:
    """Writes JPEGs of 320x256 in two classes: soft noise, which compresses as photographs do."""
    import tensorflow as tf

    random = np.random.default_rng(0)
    for number in range(PICTURES):
        os.makedirs(os.path.join(folder, str(number % 2)), exist_ok=True)
        small = random.integers(0, 256, [16, 20, 3]).astype(np.uint8)
        picture = tf.cast(tf.clip_by_value(tf.image.resize(small, [256, 320], "bicubic"), 0, 255), tf.uint8)
        noisy = picture + tf.constant(random.integers(0, 8, [256, 320, 3]).astype(np.uint8))
        tf.io.write_file(os.path.join(folder, str(number % 2), f"{number}.jpg"), tf.io.encode_jpeg(noisy))


def write_text(folder: str) -> None:
    """Writes text, and TFRecords of windows of as many tokens of two bytes each and the one after them."""
    import tensorflow as tf

    random = np.random.default_rng(0)
    os.mkdir(os.path.join(folder, "text"))
    Path(folder, "text", "all.txt").write_bytes(random.integers(97, 123, WINDOWS * 256).astype(np.uint8).tobytes())
    with tf.io.TFRecordWriter(os.path.join(folder, "windows.tfrecord")) as file:
        for _ in range(WINDOWS):
            file.write(random.integers(97, 123, 257).astype(np.uint16).tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS), help="some of %(default)s")
    parser.add_argument("--folder", help="where files are made, on the disk that is measured [a temporary one]")
    parser.add_argument("--turns", type=rounds.count, default=10, help="pieces of each (%(default)s)")
    parser.add_argument("--cpu", action="store_true", help="rates by CPU time: for a machine that others use, no grain")
    args = parser.parse_args()
    MORE.extend(["--cpu"] if args.cpu else [])
    if unknown := set(args.rows.split(",")) - set(ROWS):
        parser.error(f"--rows={','.join(sorted(unknown))} is unknown; use some of {', '.join(ROWS)}")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    for name in args.rows.split(","):
        with tempfile.TemporaryDirectory(prefix="crankshaft-reading-", dir=args.folder) as folder:
            ROWS[name](folder, args.turns)
        print(flush=True)


if __name__ == "__main__":
    run_script(main)
