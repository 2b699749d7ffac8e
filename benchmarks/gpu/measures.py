"""Measures one row of `benchmarks.gpu`, in a process that measures several. Host code."""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import crankshaft
from crankshaft.engine.data.run_data import Data
from crankshaft.engine.machine import environment
from crankshaft.launch import assembly, program
from crankshaft.parts.benchmark.measure import rounds, trace
from crankshaft.runner.base import BaseRun
from crankshaft.runner.command_line import parsing
from crankshaft.runner.jit import choose_jit
from crankshaft.runner.modes.outcome import Outcome

from .. import bits
from . import attention as attentions
from .rows import FASTEST, Row

PEAK_FLOPS = 989e12  # dense products of 16 bits: NVIDIA's data sheets of the H100 and H200 (SXM)
_DETERMINISM = "TF_DETERMINISTIC_OPS"
_TOP = 10  # kernels


def machine() -> dict[str, Any]:
    """Describes the GPU, its driver, the CPU and the versions."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.strip() if shutil.which(query[0]) else None
    build = tf.sysconfig.get_build_info()
    return {
        "gpus": environment.gpu_names(),
        "driver": driver,
        "built_for": {name: build.get(name) for name in ("cuda_version", "cudnn_version")},
        **environment.describe(os.environ),
    }


def attention(row: Row, tiny: bool) -> dict[str, Any]:
    """Measures attention by itself: plain, by blocks, and cuDNN's."""
    return attentions.compare(tiny)


def train(row: Row, tiny: bool) -> dict[str, Any]:
    """Times training, with the first of the row's batches that fits into memory, and traces a few steps of it."""
    os.environ[_DETERMINISM] = "0" if row.kernels == FASTEST else "1"
    for batch in row.batches:
        try:
            with tempfile.TemporaryDirectory() as folder:
                return {"batch": batch, **_train(row, batch, tiny, folder)}
        except (tf.errors.ResourceExhaustedError, tf.errors.InternalError) as error:
            if batch == row.batches[-1] or "memory" not in str(error):
                raise
        gc.collect()  # of what the error held
    raise AssertionError(row.batches)


def _train(row: Row, batch: int, tiny: bool, folder: str) -> dict[str, Any]:
    flags = {**row.flags, "global_batch_size": batch, "mode": "benchmark"}
    data, result = None, dict[str, Any]()
    if row.context:
        vocabulary = row.flags["model_arg"]["vocabulary"]
        windows = np.random.default_rng(0).integers(0, vocabulary, (4 * batch, row.context + 1), np.int32)
        data = Data((windows[:, :-1], windows[:, 1:]), None, vocabulary)
    if row.jpegs:
        flags["data_dir"] = write_jpegs(Path(folder), row.jpegs, 64 if tiny else 500)
    gpus = tf.config.list_logical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.reset_memory_stats(gpu.name)

    def measure(run: BaseRun) -> Outcome:
        result["choice"] = choose_jit(run, None)
        timed = rounds.run(run.strategy, run.strategy.training, rounds.Length(seconds=0.2 if tiny else 2.0), os.environ)
        names = ("steps_per_sec", "examples_per_sec", "first_step_seconds", "input_wait_fraction", "device_peak_mb")
        result.update({name: timed[name] for name in names}, jit=run.state.jit, loss=timed["train"]["loss"])
        profile = trace.profile(run.strategy, folder, 3)
        result["kernels"] = expensive_kernels(profile["ops"])
        result["busy"] = 1e-3 * profile["ops_ms_per_step"] * timed["steps_per_sec"] if gpus else None
        if row.context:
            result.update(_tokens(run, row, timed["examples_per_sec"]))
        return Outcome({})

    given, own = parsing.from_keywords(flags)
    config = program.configure_program(given, own, None, data is not None, (), owns_process=False)
    program.check(config)
    assembly.assemble_run(config, data, (), own).execute_mode(measure)
    gc.collect()
    return result


def expensive_kernels(ops: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, float]]:
    """Returns the ten most expensive ops of a trace: (name, milliseconds per step, share); a name's numbers are one."""
    times, shares = Counter[str](), Counter[str]()
    for op in ops:
        name = re.sub(r"_?\d+", "*", op["name"])
        times[name] += op["ms_per_step"]
        shares[name] += op["share"]
    return [(name, ms, shares[name]) for name, ms in times.most_common(_TOP)]


def _tokens(run: BaseRun, row: Row, examples_per_sec: float) -> dict[str, float]:
    """Returns tokens per second, and the share of the peak in 16 bits (MFU): PaLM's, appendix B, but causal or not.

    https://arxiv.org/abs/2204.02311. Operations of a recomputed forward pass do not count.
    """
    shape, parameters = row.flags["model_arg"], run.trainer.model.count_params()
    flops = 6 * parameters + 12 * shape["layers"] * shape["width"] * row.context
    tokens = examples_per_sec * row.context
    return {"tokens_per_sec": tokens, "mfu": tokens * flops / PEAK_FLOPS, "parameters": parameters}


def write_jpegs(folder: Path, count: int, size: int) -> str:
    """Writes JPEG files of size x size pixels in ten class folders, some of them the same; returns their folder."""
    random = np.random.default_rng(0)
    small = random.integers(0, 256, (16, size // 8, size // 8, 3), np.uint8)  # enlarged, it compresses as a photograph
    images = tf.cast(tf.image.resize(small, [size, size], "bicubic"), tf.int32) + random.integers(
        0, 16, (16, size, size, 3)
    )
    encoded = [tf.io.encode_jpeg(tf.cast(tf.clip_by_value(image, 0, 255), tf.uint8)).numpy() for image in images]
    for number in range(count):
        path = folder / "jpegs" / str(number % 10) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded[number % len(encoded)])
    return str(folder / "jpegs")


def resume(row: Row, tiny: bool) -> dict[str, Any]:
    """Trains a small language model at once, and stopped and resumed; compares the bits of all saved variables."""
    os.environ[_DETERMINISM] = "1"
    flags = {"model": "transformer_lm", "input": "text", "precision": "bfloat16", "mode": "train", "progress": "off"}
    flags |= {"model_arg": {"layers": 2, "width": 64 if tiny else 512, "heads": 4}, "jit": "on", "global_batch_size": 8}
    flags |= {"input_arg": {"context": 32 if tiny else 512}}
    steps = 6 if tiny else 60
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder, "whole"), Path(folder, "parts")
        crankshaft.run(run_dir=str(whole), train_steps=steps, **flags)
        for end in (steps // 2, steps):
            crankshaft.run(run_dir=str(parts), train_steps=end, may_change=(), **flags)
        ours, theirs = bits.digests(whole), bits.digests(parts)
    equal = sum(theirs.get(name) == digest for name, digest in ours.items())
    return {"variables": len(ours), "same_bits": equal, "note": f"{equal} of {len(ours)} variables have the same bits"}
