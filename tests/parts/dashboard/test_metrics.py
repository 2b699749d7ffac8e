"""Metrics of all predictions of an evaluation: monitored, shown and recorded; and evaluations of some batches.

`--metrics_port`: what Prometheus scrapes of a run over HTTP, and who may.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import logging
import os
import re
import resource
import shutil
import socket
import subprocess
import urllib.error

import numpy as np
import pytest
import tensorflow as tf
from prometheus_client.parser import text_string_to_metric_families

import crankshaft
from crankshaft import UsageError, open_run, run
from crankshaft.engine.hooks import Hook
from crankshaft.engine.metrics.predictions import Collector, Predictions
from crankshaft.parts.dashboard import metrics, serving
from crankshaft.parts.launchers.resources import free_ports
from tests.launch.conftest import MLP
from tests.pages import ROOT
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.thorough

QUIET = {"jit": "off", "progress": "off", "learning_rate": 0.05, "global_batch_size": 8}
RNG = np.random.default_rng(0)
FEATURES = {
    "user": RNG.integers(0, 7, 53).astype(np.int32),
    "x": RNG.normal(size=(53, 3)).astype(np.float32),
}
LABELS = RNG.integers(0, 3, 53).astype(np.float32)
TEXTS = [b"a" * i + b"\0" * (i % 3) for i in range(9)]
TWO = {"strategy": "mirrored", "num_virtual_devices": 2}


class Ranking(crankshaft.Trainer):
    """Scores items; its metric is NDCG per user."""

    failure = ""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1, kernel_initializer="ones")])

    def forward(self, features, training):
        return self.model(features["x"], training=training)[:, 0]

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.square(outputs - batch[1]))

    def predictions(self, outputs, batch):
        name = tf.strings.join(["0", tf.strings.as_string(batch[0]["user"]), "\0\0"])  # as bytes of any kind may end
        return {"score": outputs, "label": batch[1], "user": batch[0]["user"], "name": name}

    def compute_metrics(self, predictions):
        score, label = predictions["score"], predictions["label"]
        assert predictions["name"].tolist() == [b"0%d\0\0" % user for user in predictions["user"]]
        values = []
        for rows in predictions.groups("user"):
            discount = 1 / np.log2(np.arange(len(rows)) + 2)
            best = np.sort(label[rows])[::-1] @ discount
            values.append(label[rows][np.argsort(-score[rows], kind="stable")] @ discount / best if best else 1.0)
        image = np.linspace(0, 1, 12, dtype=np.float32).reshape(2, 6, 1)
        return {
            "ndcg": np.mean(values),
            "examples": len(label),
            "first": f"user {predictions['user'][0]}",
            "plot": image,
        }


def data():
    """48 examples to train on, which the batch size divides, and all 53 to evaluate on."""
    return ({name: each[:48] for name, each in FEATURES.items()}, LABELS[:48]), (FEATURES, LABELS)


def ndcg(score, examples=53):
    """By a loop over users, as in a textbook."""
    users: dict = {}
    for user, label, each in zip(FEATURES["user"][:examples], LABELS, score, strict=False):
        users.setdefault(int(user), []).append((each, label))
    found = []
    for items in users.values():
        ranked = [label for _, label in sorted(items, key=lambda item: -item[0])]
        gains, best = ranked, sorted(ranked, reverse=True)
        dcg, ideal = (sum(gain / np.log2(place + 2) for place, gain in enumerate(x)) for x in (gains, best))
        found.append(dcg / ideal if ideal else 1.0)
    return np.mean(found)


def events_of(run_dir, kind):
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == kind]


@pytest.mark.parametrize(
    "more",
    [
        {**TWO, "eval_batch_size": 7},
        *(pytest.param(more, marks=pytest.mark.slow) for more in ({}, {"eval_batch_size": 60})),
    ],
    ids=str,
)
def test_a_metric_of_all_examples_is_monitored_and_recorded(more, tmp_path):
    asked = {**QUIET, "monitor": "max:eval_ndcg", "run_dir": tmp_path / "run", "train_epochs": 3, **more}
    made = run(Ranking, data=data, **asked)
    score = made.predict(split="eval")
    assert made.result["eval"]["ndcg"] == pytest.approx(ndcg(score), rel=1e-6)
    assert made.result["eval"]["examples"] == 53
    assert made.result["best"]["value"] == max(row["eval_ndcg"] for row in made.history)
    recorded = [event["metrics"]["ndcg"] for event in events_of(tmp_path / "run", "evaluation")]
    assert recorded == [row["eval_ndcg"] for row in made.history]
    shown = {}
    for path in (tmp_path / "run" / "tensorboard" / "eval").iterdir():
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            shown |= {value.tag: value for value in event.summary.value}
    assert shown["first"].tensor.string_val == [f"user {FEATURES['user'][0]}".encode()]
    pixels = tf.io.decode_png(shown["plot"].tensor.string_val[2]).numpy()
    assert (pixels.shape, pixels[0, 0, 0], pixels[1, 5, 0]) == ((2, 6, 1), 0, 255)
    evaluated = run(Ranking, data=data, **{**asked, "mode": "eval", **TWO})
    assert evaluated.result["eval"]["ndcg"] == pytest.approx(ndcg(score), rel=1e-6)


def test_data_passed_to_a_call_and_streams_have_them_too():
    stream = tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).filter(lambda *_: True)
    with open_run(Ranking, data=lambda: (data()[0], stream), **QUIET, **TWO) as opened:
        opened.train(steps=2)
        for given in (None, stream, (FEATURES, LABELS)):
            assert opened.evaluate(given)["ndcg"] == pytest.approx(ndcg(opened.predict(FEATURES)), rel=1e-6)
        some = {name: each[:20] for name, each in FEATURES.items()}, LABELS[:20]
        assert opened.evaluate(some)["ndcg"] == pytest.approx(ndcg(opened.predict(some[0]), 20), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, TWO], ids=str)
def test_an_evaluation_of_some_batches_is_shown_as_partial(more, tmp_path, capsys):
    asked = {**QUIET, "eval_batch_size": 5, "train_epochs": 2, "run_dir": tmp_path / "run", **more}
    made = run(Ranking, data=data, **{**asked, "progress": "plain"}, eval_batches=4)
    first = {name: each[:20] for name, each in FEATURES.items()}
    assert made.result["eval_batches"] == 4
    assert made.result["eval"]["examples"] == 20
    assert made.result["eval"]["ndcg"] == pytest.approx(ndcg(made.predict(first), 20), rel=1e-6)
    error = np.mean(np.square(made.predict(first) - LABELS[:20]))
    assert made.result["eval"]["loss"] == pytest.approx(error, rel=1e-5)  # float32's rounding
    assert "evaluation of the first 4 of 11 batches" in capsys.readouterr().out
    assert {event["eval_batches"] for event in events_of(tmp_path / "run", "evaluation")} == {4}
    whole = run(Ranking, data=data, **{**asked, "mode": "eval"}).result
    assert (whole["eval"]["examples"], "eval_batches" in whole) == (53, False)
    all_of_them = run(Ranking, data=data, **{**asked, "run_dir": None}, eval_batches=11).result
    assert (all_of_them["eval"]["examples"], "eval_batches" in all_of_them) == (53, False)


def returning(value):
    return type("Odd", (Ranking,), {"compute_metrics": lambda self, predictions: value})


@pytest.mark.parametrize(
    ("trainer", "more", "line"),
    [
        (returning([1.0]), {}, r"Odd.compute_metrics returned a list; return numbers by name"),
        (returning({"loss": 1.0}), {}, r"Odd.compute_metrics returned 'loss', which is another metric"),
        (
            returning({"rows": [[1], [1, 2]]}),
            {},
            r"Odd.compute_metrics returned list as 'rows'; return a number, a str",
        ),
        (returning({"curve": np.zeros(5)}), {}, r"returned float64\[5\] as 'curve'; return a number, a str, or images"),
        (Ranking, {"monitor": "eval_ndcg"}, r"monitor=eval_ndcg: whether a higher or a lower ndcg is better"),
        (Ranking, {"monitor": "max:eval_mrr"}, r"monitor=max:eval_mrr is not measured in this run; use one of .*ndcg"),
        (Ranking, {"eval_batches": 2, "mode": "train"}, r"eval_batches=2 has no use with mode=train, which makes no"),
    ],
    ids=["a list", "another's name", "uneven lists", "a vector", "no direction", "no such metric", "no evaluation"],
)
def test_mistakes_are_one_line(trainer, more, line, tmp_path):
    with pytest.raises(UsageError, match=line):
        run(trainer, data=data, train_steps=1, run_dir=tmp_path / "run", **QUIET, **more)


def test_values_that_are_of_no_example_are_one_line():
    class Whole(Ranking):
        def predictions(self, outputs, batch):
            return {"mean": tf.reduce_mean(outputs)}

    class Fewer(Ranking):
        def predictions(self, outputs, batch):
            return {"odd": outputs[1:]}

    class Own(Ranking):
        def eval_step(self, batch):
            return {"loss": self.loss(self.forward(batch[0], training=False), batch)}

    class Forgotten(Ranking):
        def predictions(self, outputs, batch):
            pass

    class Missing(Ranking):
        def predictions(self, outputs, batch):
            return {"score": outputs, "label": None}

    lines = {
        Forgotten: r"Forgotten.predictions returned a NoneType; return tensors \[examples, ...\] by name",
        Missing: r"Missing.predictions returned None as a value; leave it out",
        Whole: r"Whole.predictions: output mean is one number",
        Fewer: r"Fewer.predictions: output odd has not one entry per example",
    }
    for trainer, line in {**lines, Own: r"Own.eval_step returns no predictions for it; return \(metrics, "}.items():
        with pytest.raises(UsageError, match=line):
            run(trainer, data=data, train_steps=1, **QUIET)


def test_an_error_of_the_user_s_is_raised_with_its_own_traceback():
    class Failing(Ranking):
        def compute_metrics(self, predictions):
            return {"ndcg": {}["missing"]}

    with pytest.raises(KeyError, match="missing") as caught:
        run(Failing, data=data, train_steps=1, **QUIET)
    assert caught.traceback[-1].name == "compute_metrics"


@pytest.mark.parametrize("most", [1 << 20, 2700, 2000, 100, 0])
def test_beyond_its_bound_predictions_are_in_a_file(most, tmp_path, caplog):
    rows = Collector(most, str(tmp_path), "evaluation at step 1")
    parts = [
        {"id": np.arange(10 * i, 10 * i + 10), "tokens": np.full((10, 2 + i % 3), i, np.int32), "text": text}
        for i, text in enumerate([np.array([TEXTS[i]] * 10, object) for i in range(9)])
    ]
    with caplog.at_level(logging.INFO):
        for part in parts:
            rows.add(part)
    found = Predictions(rows.all())
    assert (found.num_examples, list(tmp_path.iterdir())) == (90, [])
    assert sum("are in temporary files" in line for line in caplog.messages) == (most < 1 << 20)
    np.testing.assert_array_equal(found["id"], np.arange(90))
    assert found["text"].tolist() == [text for text in TEXTS for _ in range(10)]
    padded = [[i] * (2 + i % 3) + [0] * (2 - i % 3) for i in range(9)]
    np.testing.assert_array_equal(found["tokens"], np.repeat(padded, 10, 0))
    assert isinstance(found["id"], np.memmap) == (most < 1 << 20)


def test_a_run_whose_predictions_are_in_a_file_has_the_same_metrics(tmp_path, caplog):
    class Small(Ranking):
        predictions_memory_mb = 1e-6

    asked = {**QUIET, "train_steps": 3, "eval_batch_size": 4}
    with caplog.at_level(logging.INFO):
        found = run(Small, data=data, run_dir=tmp_path / "run", **asked).result["eval"]
    assert found == run(Ranking, data=data, **asked).result["eval"]
    assert [line for line in caplog.messages if line.startswith("evaluation at step 3: its predictions take more")]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["eval"]["ndcg"] == found["ndcg"]


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


@pytest.mark.holds("Pages and metrics accept 16")
def test_connections_that_send_nothing_take_few_descriptors_and_no_scrapes_turn(monkeypatch):
    with metrics.serving(0, "", lambda: None, {"model": "a"}) as port, contextlib.ExitStack() as stack:
        before, link = open_files(), f"http://127.0.0.1:{port}/metrics"
        for _ in range(90):
            idle = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE))
            idle.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        with urllib.request.urlopen(link, timeout=PATIENCE) as page:
            assert "crankshaft_run_info" in page.read().decode()
        assert open_files() - before - 90 <= 20
        monkeypatch.setattr(serving, "_SECONDS", 0.0)
        assert idle.recv(1) == b""  # closed without a reply


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


@pytest.mark.holds("[`--metrics_port`]")
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
