"""An evaluator beside a run, without the run: when it ends."""

from __future__ import annotations

from types import SimpleNamespace

from crankshaft.parts.parameter_servers import evaluator
from crankshaft.runner.command_line.config import Config
from crankshaft.runner.host.tasks import Cluster


def test_an_evaluator_of_a_run_without_an_end_ends_with_its_coordinator(tmp_path, monkeypatch):
    addresses = (("chief", "127.0.0.1:1"), ("evaluator", "127.0.0.1:2"))
    config = Config(
        strategy="parameter_server", monitor="train_loss", run_dir=str(tmp_path), cluster=Cluster(addresses, 1)
    )
    checkpoints = SimpleNamespace(clean=lambda: None, wait=lambda: None)
    run = SimpleNamespace(config=config, train_steps=None, log=print, checkpoints=checkpoints, best=checkpoints)
    run.checkpoints_for = lambda which: checkpoints
    gone = iter([False, True])
    monkeypatch.setattr(evaluator, "Presence", lambda *_: SimpleNamespace(is_gone=lambda: next(gone)))
    monkeypatch.setattr(evaluator, "answers", lambda address: None)
    monkeypatch.setattr(evaluator, "restored_since", lambda run, step: ())
    monkeypatch.setattr(evaluator, "_POLL_SECONDS", 0.0)
    assert evaluator.watch(run).code == 0
    assert next(gone, None) is None
