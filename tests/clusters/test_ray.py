"""`examples/ray_train.py` on two nodes of Ray's, one of which is taken away."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.runs import assert_equal_bits, newest
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.clusters
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cluster():
    utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: pip install '.[ray]'")
    made = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        made.add_node(num_cpus=1)
    yield made
    made.shutdown()


def start(cluster, name: str, *arguments: object) -> subprocess.Popen:
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output(program: subprocess.Popen) -> str:
    out, _ = program.communicate(timeout=PATIENCE)
    assert program.returncode == 0, out[-5000:]
    return out


def test_a_node_that_is_taken_away_ends_in_the_bits_of_an_undisturbed_run(cluster, tmp_path):
    calm = output(start(cluster, "ray_train.py", tmp_path / "calm", 60))
    program = start(cluster, "ray_train.py", tmp_path / "disturbed", 60)
    wait_until(lambda: newest(tmp_path / "disturbed") >= 100, program)
    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
    cluster.add_node(num_cpus=1)
    disturbed = output(program)
    assert "resumed at step" in disturbed
    assert_equal_bits(tmp_path / "disturbed", tmp_path / "calm", "eval")
    reported = [re.search(r"^step 1380: loss .*, accuracy .*$", each, re.MULTILINE) for each in (calm, disturbed)]
    assert reported[0][0] == reported[1][0]


def test_ray_tune_finds_and_prunes(cluster):
    found = re.search(r"best: accuracy (\S+) by", output(start(cluster, "ray_tune.py")))
    assert float(found[1]) > 0.9  # a guess is right once in ten
