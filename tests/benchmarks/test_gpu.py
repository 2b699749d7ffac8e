"""Measurements on a GPU: their table, cuDNN's attention as far as a CPU has it, and, slow, every row, small."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import tensorflow as tf

from benchmarks.gpu import attention, measures
from benchmarks.gpu.rows import rows
from tests.launch.local_tasks import ROOT
from tests.waiting import PATIENCE

pytestmark = pytest.mark.thorough


def test_kernels_of_all_layers_count_as_one():
    ops = [{"name": f"block_{i}/up/MatMul", "ms_per_step": 1.0, "share": 0.2} for i in range(3)]
    ops += [{"name": "logits/MatMul", "ms_per_step": 2.0, "share": 0.4}]
    assert measures.expensive_kernels(ops) == [
        ("block*/up/MatMul", 3.0, pytest.approx(0.6)),
        ("logits/MatMul", 2.0, 0.4),
    ]


def test_attention_lowers_to_cudnns_calls_for_xla():
    """A GPU compiles the calls; here, XLA's input has both, with a configuration that is JSON."""
    x = [tf.zeros([2, 3, 16, 64], tf.bfloat16)] * 4

    @tf.function(jit_compile=True)
    def gradients(queries, keys, values, upstream):
        with tf.GradientTape() as tape:
            tape.watch([queries, keys, values])
            outputs = attention.fused(queries, keys, values)
        return tape.gradient(outputs, [queries, keys, values], upstream)

    lines = gradients.experimental_get_compiler_ir(*x)(stage="hlo").splitlines()
    calls = [line for line in lines if "__cudnn$fmhaSoftmax" in line]
    assert [line.split('custom_call_target="')[1].split('"')[0] for line in calls] == [
        "__cudnn$fmhaSoftmax",
        "__cudnn$fmhaSoftmaxBackward",
    ]
    for line, products in zip(calls, (2, 4), strict=True):
        config = json.loads(line.split("backend_config=")[1])["cudnn_fmha_backend_config"]
        assert (config["mask_type"], config["fmha_scale"]) == ("CAUSAL", 0.125)
        assert sum(name.endswith("dot_dimension_numbers") for name in config) == products


@pytest.mark.slow
def test_every_row_is_measured_with_small_sizes(tmp_path):
    path = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--minutes=60", f"--json={path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * PATIENCE)
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())["rows"]
    assert list(results) == [row.title for row in rows(tiny=True)]
    assert not [title for title, result in results.items() if "failed" in result]
    assert all(result["steps_per_sec"] > 0 and result["kernels"] for result in results.values() if "batch" in result)
    resumed = results["stopped and resumed"]
    assert resumed["same_bits"] == resumed["variables"] > 0
