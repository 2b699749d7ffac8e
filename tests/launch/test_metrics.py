"""`--metrics_port`: what Prometheus scrapes of a run over HTTP, and who may."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from crankshaft.engine.hooks import Hook
from crankshaft.launch.cluster.resources import free_ports
from crankshaft.launch.host import serving
from crankshaft.launch.run import metrics
from tests.launch.conftest import MLP
from tests.pages import ROOT
from tests.waiting import PATIENCE, wait_until

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


def dashboard() -> list[str]:
    """The queries of Grafana's dashboard."""
    shown = json.loads((ROOT / "docs" / "grafana.json").read_text())
    return [target["expr"] for panel in shown["panels"] for target in panel["targets"]]


@pytest.fixture
def port():
    return free_ports(1)[0]


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
    queries = "".join(dashboard())
    named = {name.removesuffix("_total") for name in re.findall(r"(?:crankshaft|process)_\w+", queries)}
    assert named - {"crankshaft_reduce_wait_ratio"} <= set(found)  # of several workers
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")  # the run has ended


def test_a_port_that_is_taken_and_an_address_without_use_are_one_line(inside, crank_each, port, tmp_path):
    run = (*RUN, f"--run_dir={tmp_path}/run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        line = inside(*run, f"--metrics_port={port}").mistake
    assert line.startswith(f"metrics_port={port}: 127.0.0.1:{port} can't be listened at (Address already in use)")
    alone, evaluates = crank_each([[*run, "--bind=127.0.0.1"], [*run, "--mode=eval", "--metrics_port=1"]])
    assert "bind=127.0.0.1 has no use without several tasks or metrics_port" in alone.mistake
    assert "metrics_port=1 has no use with mode=eval" in evaluates.mistake


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_connections_that_send_nothing_take_few_descriptors_and_keep_no_scrape_from_its_figures(monkeypatch):
    with metrics.serving(0, "", lambda: None, {"model": "a"}) as port, contextlib.ExitStack() as stack:
        before, link = open_files(), f"http://127.0.0.1:{port}/metrics"
        for _ in range(90):
            idle = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE))
            idle.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        with urllib.request.urlopen(link, timeout=PATIENCE) as page:
            assert "crankshaft_run_info" in page.read().decode()
        assert open_files() - before - 90 <= 20
        monkeypatch.setattr(serving, "_SECONDS", 0.0)
        assert idle.recv(1) == b""  # it was told nothing, and is closed


def test_the_last_descriptors_are_the_runs():
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with metrics.serving(0, "", lambda: None, {"model": "a"}) as port, socket.create_server(("127.0.0.1", 0)) as lowest:
        used = {int(name) for name in os.listdir("/proc/self/fd")}
        free = (number for number in itertools.count(lowest.fileno() + 1) if number not in used)
        _, servers = next(free), next(free)  # the client's, and the last that the server can get
        resource.setrlimit(resource.RLIMIT_NOFILE, (servers + 1, most[1]))
        try:
            with pytest.raises((ConnectionResetError, http.client.RemoteDisconnected)):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, most)


def test_only_a_request_to_this_host_by_its_name_or_an_address_is_answered():
    here = ["127.0.0.1:9100", "[::1]:9100", "localhost", "10.1.2.3", f"{socket.gethostname()}:1"]
    with metrics.serving(0, "", lambda: None, {"model": "a"}) as port:
        for host in [*here, "evil.example:9100", "127.0.0.1.evil.example", "", "[::1].evil.example"]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
            connection.request("GET", "/metrics", headers={"Host": host})
            answer = connection.getresponse()
            is_here = host in here
            assert (answer.status, b"crankshaft_run_info" in answer.read()) == (200 if is_here else 400, is_here), host


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("prometheus"), reason="no Prometheus is installed; Debian's package prometheus")
def test_a_real_prometheus_scrapes_a_live_run_and_answers_the_dashboards_queries(crank, tmp_path, port):
    (own,) = free_ports(1)
    run = (*MLP, "--train_steps=10000000", "--eval_every_steps=0", "--progress=off", f"--metrics_port={port}")
    program = crank.start("--workers=2", "--", *run, f"--run_dir={tmp_path}/run", command="local")
    (tmp_path / "prometheus.yml").write_text(f"""
global: {{scrape_interval: 1s}}
scrape_configs: [{{job_name: crankshaft, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}]
""")

    def asked(query: str) -> list[dict]:
        link = f"http://127.0.0.1:{own}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(link) as answer:
            return json.loads(answer.read())["data"]["result"]

    def step() -> float:
        try:
            return max((float(sample["value"][1]) for sample in asked("crankshaft_step")), default=0.0)
        except OSError:  # it does not listen yet
            return 0.0

    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb"]
    with open(tmp_path / "log", "wb") as log:
        prometheus = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{own}"], stdout=log, stderr=log)
    try:
        wait_until(lambda: step() > 0, program.process, prometheus, shows=(tmp_path / "log").read_text)
        first = step()
        wait_until(lambda: step() > first, program.process, prometheus)
        queries = [query.replace("$job", "crankshaft") for query in dashboard()]
        wait_until(lambda: all(map(asked, queries)), program.process, prometheus)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            text = page.read()
        checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")
    finally:
        prometheus.terminate()
        prometheus.wait()
