"""`--metrics_port`: what Prometheus scrapes of a run over HTTP, and who may."""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from crankshaft.engine.hooks import Hook
from tests.launch.conftest import MLP
from tests.pages import ROOT

RUN = (*MLP, "--train_steps=60", "--checkpoint_every_steps=20", "--eval_every_steps=0", "--progress=plain")


class Scrape(Hook):
    """Scrapes at a step, once the record has what came before."""

    name = "scrape"

    def __init__(self, port: int, step: int):
        self.port, self.step, self.families = port, step, {}

    def next_due(self, step, status):
        return self.step if step < self.step else None

    def __call__(self, status):
        if status.step == self.step:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as page:
                text = page.read().decode()
            self.families = {family.name: family for family in text_string_to_metric_families(text)}


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_scrape_has_the_runs_figures_by_prometheus_conventions(inside, tmp_path, port):
    scrape = Scrape(port, 50)
    done = inside(*RUN, f"--run_dir={tmp_path}/run", f"--metrics_port={port}", hooks=[scrape]).ok()
    assert f"metrics: http://127.0.0.1:{port}/metrics" in done.out
    found = scrape.families

    def value(name: str) -> float:
        (sample,) = found[name].samples
        return sample.value

    assert value("crankshaft_step") == 50
    assert value("crankshaft_until_step") == 60
    assert value("crankshaft_steps_per_second") > 0
    assert 0 < value("crankshaft_goodput_ratio") < 1
    assert value("crankshaft_restarts") == 0
    assert found["crankshaft_restarts"].type == "counter"
    assert value("crankshaft_checkpoint_timestamp_seconds") > 1e9
    assert value("process_resident_memory_bytes") > 1e8
    spent = {sample.labels["kind"]: sample.value for sample in found["crankshaft_spent_seconds"].samples}
    assert spent["steps"] > 0
    assert {sample.labels["name"] for sample in found["crankshaft_metric"].samples} >= {"loss", "accuracy"}
    assert [sample.labels["worker"] for sample in found["crankshaft_worker_step_seconds"].samples] == ["this process"]
    shown = json.loads((ROOT / "docs" / "grafana.json").read_text())
    queries = [target["expr"] for panel in shown["panels"] for target in panel["targets"]]
    named = {name.removesuffix("_total") for query in queries for name in re.findall(r"[a-z_]+(?=\{)", query)}
    assert named - {"crankshaft_reduce_wait_ratio"} <= set(found)  # of several workers
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")  # the run has ended


def test_a_port_that_is_taken_and_an_address_without_use_are_one_line(inside, crank_each, port, tmp_path):
    run = (*RUN, f"--run_dir={tmp_path}/run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        line = inside(*run, f"--metrics_port={port}").mistake
    assert line.startswith(f"--metrics_port={port}: 127.0.0.1:{port} can't be listened at (Address already in use)")
    alone, evaluates = crank_each([[*run, "--bind=127.0.0.1"], [*run, "--mode=eval", "--metrics_port=1"]])
    assert "--bind=127.0.0.1 has no use without several tasks or --metrics_port" in alone.mistake
    assert "--metrics_port=1 has no use with --mode=eval" in evaluates.mistake
