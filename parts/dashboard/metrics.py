"""Serves a run's figures to Prometheus, at /metrics. Nothing here starts TensorFlow.

The figures are those of the record's newest window: a scrape costs the steps nothing. Names and units are by
Prometheus's conventions (https://prometheus.io/docs/practices/naming): seconds, bytes, ratios, counters in _total.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import Any

from ...runner.command_line.config import Config
from ...runner.failures import UsageError
from .serving import Server
from .serving import serving as served

_LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def serving_run(config: Config, get_run: Callable[[], Any]) -> Iterator[None]:
    """Serves the metrics of a run within, with the labels that name it, and prints where; see `serving`."""
    cluster, port = config.cluster, config.metrics_port or 0
    port += cluster.index if cluster and port and cluster.is_on_one_host else 0
    labels = {"model": config.model or "", "strategy": config.strategy, "run_dir": config.configured_run_dir or ""}
    with serving(port, config.bind or "", get_run, {**labels, "task": cluster.task if cluster else "chief"}) as port:
        if config.is_chief and config.progress != "off":
            print(f"metrics: http://{config.bind or _LOOPBACK}:{port}/metrics", flush=True)
        yield


@contextlib.contextmanager
def serving(port: int, address: str, get_run: Callable[[], Any], labels: dict[str, str]) -> Iterator[int]:
    """Serves /metrics within, in a thread; yields the port.

    Args:
      port: port to listen at; 0 takes a free one.
      address: address of this host at which to listen; empty is loopback's.
      get_run: returns the run, None before it exists.
      labels: Prometheus labels that name the run.

    Raises:
      UsageError: the port is in use or not allowed.
    """
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    registry.register(_Collector(get_run, labels))
    prometheus_client.ProcessCollector(registry=registry)  # memory, CPU time, open files
    try:
        server = Server(address or _LOOPBACK, port, prometheus_client.make_wsgi_app(registry))
    except OSError as error:
        fix = "give bind one of this host's, see `ip address`" if error.errno == errno.EADDRNOTAVAIL else "use another"
        raise UsageError(
            f"metrics_port={port}: {address or _LOOPBACK}:{port} can't be listened at ({error.strerror}); {fix}"
        ) from None
    with served(server):
        yield server.port


class _Collector:
    """Makes the figures of a run when they are scraped."""

    def __init__(self, get_run: Callable[[], Any], labels: dict[str, str]):
        self._get_run, self._labels = get_run, labels

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, InfoMetricFamily

        yield InfoMetricFamily("crankshaft_run", "The run.", value=self._labels)
        if (run := self._get_run()) is None:
            return
        yield _gauge("step", "Updates done.", run.step)
        if run.train_steps:
            yield _gauge("until_step", "The last step of the run.", run.train_steps)
        if (record := run.record) is None:
            return
        spent, window = record.spent, record.latest
        total = spent.pop("total")
        seconds = CounterMetricFamily("crankshaft_spent_seconds", "Wall time by kind.", labels=["kind"])
        for kind, value in spent.items():
            seconds.add_metric([kind], value)
        yield seconds
        goodput = spent["steps"] / max(total, 1e-9)
        yield _gauge("goodput_ratio", "Steps' share of the time since the first start.", goodput)
        yield CounterMetricFamily("crankshaft_restarts", "Starts after the first.", value=record.past.attempts)
        if record.saved:
            text = "When the newest checkpoint was written: time() less this is its age."
            yield _gauge("checkpoint_timestamp_seconds", text, record.saved_at)
        for name, (key, text) in {
            "epoch": ("epoch", "Passes over the data."),
            "steps_per_second": ("steps_per_sec", "Updates a second."),
            "examples_per_second": ("examples_per_sec", "Examples a second."),
            "input_wait_ratio": ("input_wait_fraction", "Share of the time that steps wait for input."),
            "reduce_wait_ratio": ("reduce_fraction", "Share of workers' time that they wait for each other."),
            "learning_rate": ("learning_rate", "The learning rate."),
        }.items():
            if window.get(key) is not None:  # there is none before the first window
                yield _gauge(name, text, window[key])
        yield _gauge("metric", "Means of the metrics in the newest window.", window.get("metrics", {}), "name")
        for name, text in {
            "step": "A worker's time for a step.",
            "input_wait": "Of a step, a worker's wait for input.",
            "reduce_wait": "Of a step, a worker's wait for the others.",
        }.items():
            workers = [worker for worker in window.get("workers", ()) if f"{name}_ms" in worker]
            values = {worker["name"]: worker[f"{name}_ms"] / 1e3 for worker in workers}
            yield _gauge(f"worker_{name}_seconds", text, values, "worker")


def _gauge(name: str, text: str, value, label: str | None = None) -> Any:
    """Makes a gauge of a number, or of one for each value of a label."""
    from prometheus_client.core import GaugeMetricFamily

    if label is None:
        return GaugeMetricFamily(f"crankshaft_{name}", text, value=float(value))
    gauge = GaugeMetricFamily(f"crankshaft_{name}", text, labels=[label])
    for label_value, number in value.items():
        gauge.add_metric([label_value], float(number))
    return gauge
