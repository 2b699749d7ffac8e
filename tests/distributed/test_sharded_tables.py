"""A table on two parameter servers: trained there by a real cluster, then taken up by one device, and the other way."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests import runs
from tests.distributed.conftest import ROOT

_SECONDS = 240
# 8 x 1,500 rows of 16 are 750 KiB: two shards of more than 256 KiB each; the wide part's 47 KiB stay whole.
RUN = (
    "--model=wide_deep",
    "--input=synthetic_clicks",
    *(f"--input_arg={arg}" for arg in ("examples=20000", "eval_examples=3000", "rows=1500")),
    *("--global_batch_size=256", "--optimizer=adagrad", "--learning_rate=0.05", "--progress=off"),
)
SERVERS = ("-m", "launch.local", "--workers=1", "--ps=2", "--", "--strategy=parameter_server")
ALONE = ("-m", "launch.train")


def launch(program, *flags) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *program, *RUN, *map(str, flags)]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=_SECONDS)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_shards_outlive_the_cluster_that_made_them(tmp_path):
    run_dir = f"--run_dir={tmp_path}/run"
    out = launch(SERVERS, run_dir, "--train_steps=150")
    assert "Embedding: 'deep', 12,000 rows x 16, 0.8 MB, shards: 2" in out
    assert "Embedding: 'wide', 12,000 rows x 1, 0.0 MB, shards: 1" in out
    shards = {name: x.shape for name, x in runs.tensors(tmp_path / "run").items() if "deep_table" in name}
    assert sorted(shards.values()) == [(6000, 16), (6000, 16)]
    found = json.loads((tmp_path / "run" / "result.json").read_text())["eval"]
    assert found["auc"] > 0.6
    again = launch(ALONE, run_dir, "--mode=eval", "--train_steps=150")
    assert f"auc {found['auc']:g}" in again
    further = launch(ALONE, run_dir, "--train_steps=170")
    assert "shards: 2" in further
    assert runs.newest(tmp_path / "run") == 170
