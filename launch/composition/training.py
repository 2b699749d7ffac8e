"""Trains a run from its latest checkpoint, for a number of steps or to its end."""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ... import parts
from ...engine import logging, version
from ...engine.checkpoints import Manifest
from ...engine.data import form
from ...engine.data.order import Order
from ...engine.errors import LostPeerError, counted
from ...engine.hooks import Hook, evaluation, saving
from ...engine.hooks.monitors import Monitor
from ...engine.hooks.saving import Best, BestCheckpoint, BestWeights
from ...engine.loop import Loop
from ...engine.machine.pauses import Pauses
from ...engine.metrics.pairs import Confusion
from ...engine.metrics.sums import SumSpec, kinds_by_name
from ...engine.strategies import jit_choice
from ...engine.strategies.base import Stop
from ...engine.trainer import computes_metrics
from ...runner import results
from ...runner.base import BaseRun
from ...runner.command_line import config as configs
from ...runner.command_line.values import short
from ...runner.failures import EXIT_REGROUP, EXIT_TERMINATED, UsageError
from ...runner.history import Means
from ...runner.host.signals import EXIT_CODES, Signals
from ...runner.host.text_files import write_run_file
from ...runner.jit import choose_jit
from ...runner.modes import external
from ...runner.modes.evaluate import by_class
from ...runner.modes.outcome import Outcome, run_result
from ...runner.progress import duration, evaluation_line, print_model_summary
from ...runner.restored import restoring, weights
from . import hooks

if TYPE_CHECKING:
    from ...parts.memory_snapshots.in_memory import Snapshots


def prepare(run: BaseRun, user_hooks: Sequence[Hook], began: float) -> Snapshots | None:
    """Makes a run's hooks and its loop, see `hooks.make_hooks`, and its snapshots in memory, if it takes some."""
    config, pauses, snapshots = run.config, Pauses(), None
    takes = config.snapshot_seconds and hasattr(os, "memfd_create") and parts.has("memory_snapshots")
    if run.checkpoints is not None and takes:
        from ...parts.memory_snapshots.run_snapshots import make_snapshots

        snapshots = make_snapshots(run)
        run.take_from_memory = snapshots.write_newest
    run.hooks = hooks.make_hooks(run, user_hooks, began, pauses, snapshots)

    def write_snapshot() -> str | None:
        """Writes the newest snapshot while the run is busy with something else; returns a line for the user."""
        step = snapshots.write_alone() if snapshots else None
        return None if step is None else f"step {step:,} is saved meanwhile, from memory, in {config.run_dir}"

    run.signals = Signals(
        run.stop_request.request,
        config.owns_process,
        is_reused=True,
        meanwhile=write_snapshot,
        saves=bool(config.run_dir),
    )
    run.loop = Loop(run.strategy, run.state, run.hooks, run.train_steps, pauses.clock)
    return snapshots


def close(run: BaseRun, snapshots: Snapshots | None, error: BaseException | None) -> None:
    """Releases what hooks hold, however the run ended.

    After a peer's loss it first saves what is in memory, unless that is left to a parent.
    """
    with contextlib.ExitStack() as stack:
        # An exit stack calls in reverse, and each even if another raises: signals are handled until all is closed.
        stack.callback(run.signals.close)
        for hook in run.hooks:
            stack.callback(hook.close)
        # The strategy names the peer, by a LostPeerError, once the hooks are closed.
        may_be_lost = isinstance(error, (LostPeerError, tf.errors.OpError)) and len(run.strategy.worker_names) > 1
        if error and snapshots and may_be_lost:
            from ...parts.memory_snapshots.run_snapshots import save_after_loss

            save_after_loss(run, snapshots, error)


def restore_newest(run: BaseRun, to_end: bool) -> None:
    """Restores the run's latest checkpoint, if any, writes the run's configuration and model, and prints them."""
    config = run.config
    manifest = restoring.restore_to_train(run, to_end)
    run.resumed_from = manifest.step if manifest else None
    run.state.is_resumed = manifest is not None
    if config.writes_run:  # not before: a run that can't be resumed stays unchanged
        write_run_file(config.files.config, config.as_json())
        weights.write_description(run, config.files.path)
    if run.prints:
        inventory = run.trainer.inventory
        print_model_summary(inventory.models, tables=list(inventory.tables.values()))
    run.log(*_first_lines(run, manifest))
    if config.mode == "train_and_eval" and not run.evaluates:
        run.log("no evaluation data: no evaluation is made")
    for line in run.strategy.summary_lines():
        run.log(line)


def train_to_end(run: BaseRun) -> Outcome:
    """Trains a run from its latest checkpoint to its end."""
    assert run.train_steps is not None  # only an open run may be endless
    restore_newest(run, to_end=True)
    with run.signals:
        _make_ready(run)
        run.loop.begin()
        run.loop.train_to(run.train_steps)
        run.loop.end()
    ended = outcome(run)
    if ended.code or not run.config.export_dir:
        return ended
    from ...runner.modes.export import export

    exported = export(run)
    return ended._replace(
        result={**ended.result, "export": exported.result["export"]}, lines=[*ended.lines, *exported.lines]
    )


def train(run: BaseRun, steps: int | None, epochs: float | None, split=None) -> Means:
    """Trains for so many steps, or epochs, on the run's own data or external data; see `Run.train`."""
    if split is None:
        until = _step_after(run, steps, epochs, run.strategy.training.feed.order)
        _make_ready(run)
        return Means(run.loop.train_to(until))
    with contextlib.closing(external.program(run, "train", split, steps)) as program:
        return Means(run.loop.train_to(_step_after(run, steps, epochs, program.feed.order), program))


def _make_ready(run: BaseRun) -> None:
    """Finds a mistake in the evaluation before the first step, and chooses whether steps are one XLA program."""
    if run.is_ready or (run.train_steps is not None and run.step >= run.train_steps):
        return
    run.is_ready = True
    # A mistake in the evaluation shows now, not after an epoch; the attempt that has left its state in memory had none.
    is_needed = not run.is_from_memory or any(hook.reads_metrics for hook in run.hooks)
    metrics = run.strategy.traced_evaluations() if run.evaluates and is_needed else ()
    _find_monitored(run, metrics)
    if run.strategy.is_chief and any(issubclass(metric.kind, Confusion) for metric in metrics):
        _warn_of_missing_classes(run)
    left = None if run.train_steps is None else run.train_steps - run.step
    run.log(choose_jit(run, left))
    run.strategy.training.unrolls = run.strategy.training.unrolls and jit_choice.unrolls(left)


def _warn_of_missing_classes(run: BaseRun) -> None:
    """Warns of classes of which training or evaluation data alone has examples, if labels can be read alone."""
    known = [classes for split in run.splits.values() if (classes := form.classes(split)) is not None]
    if len(known) < len(run.splits):
        return
    trained, evaluated = known[0], set[int]().union(*known[1:])
    if trained == evaluated:
        return
    names = dict(enumerate(run.names.classes or ()))
    parts = []
    for name, only in (("evaluation", evaluated - trained), ("training", trained - evaluated)):
        if only:
            shown = short(", ".join(f"{number} {names.get(number, '')}".rstrip() for number in sorted(only)))
            parts.append(f"the {name} data alone has examples of class {shown}")
    logging.warning(
        "%s, so what is not in both is not trained, or not evaluated; shuffle the examples before they are divided%s",
        *(", and ".join(parts), " (validation_split takes the last ones)" if run.config.validation_split else ""),
    )


def _find_monitored(run: BaseRun, measured: Sequence[SumSpec]) -> None:
    """Finds the metrics that hooks monitor among those of an evaluation, and prints which they are.

    Without an evaluation those of training are found once a step is traced.
    """
    kinds, monitors = kinds_by_name(measured), [hook for hook in run.hooks if isinstance(hook, Monitor)]
    named = run.config.monitored
    has_all = kinds and named.source == "eval" and not computes_metrics(run.trainer)
    is_default = named.name == "eval_loss" and all(isinstance(hook, BestCheckpoint) for hook in monitors)
    # `compute_metrics` may return it later, but of several sets none has the default's name.
    is_missing = kinds and (has_all or "" not in run.strategy.evaluations) and named.find(kinds) is None
    if is_missing and is_default and not run.config.restore_best:
        measured_names = ", ".join(f"eval_{name}" for name in sorted(kinds))
        run.log(f"monitored: nothing, since there is no eval_loss; monitor= keeps the best by one of {measured_names}")
        run.hooks[:] = [hook for hook in run.hooks if hook not in monitors]
        monitors = []
    if has_all and named.metric != "loss" and named.find(kinds) is None:  # a slip, even if no hook monitors it
        raise named.not_measured(kinds)
    for hook in run.hooks:
        hook.find_metrics(kinds, run.trainer)
    for monitored in dict.fromkeys(hook.monitored.by_name for hook in monitors):
        run.log(f"monitored: {monitored.described()}")


def _step_after(run: BaseRun, steps: int | None, epochs: float | None, order: Order) -> int:
    """Converts a call's steps, or epochs, to the step at which it ends, or the run's end if that comes first.

    Raises:
      UsageError: they are not a length, or the run has stopped.
    """
    step, last = run.step, run.train_steps
    if run.stop:
        fix = "look at run.stop before each call; after early stopping, reset_patience() lets it continue"
        raise UsageError(f"train(): the run has stopped ({run.stop}); {fix}")
    if steps is not None and epochs is not None:
        raise UsageError(f"train(steps={steps}, epochs={epochs}): both are given; use one of them")
    if steps is None and epochs is None:
        if last is None:
            raise UsageError("train(): how long? give steps or epochs, or open the run with train_steps")
        return last
    name, length = ("steps", steps) if epochs is None else ("epochs", epochs)
    kinds = numbers.Integral if epochs is None else numbers.Real
    if not isinstance(length, kinds) or isinstance(length, bool) or not 0 < length < math.inf:
        raise UsageError(f"train({name}={length!r}): give a number above 0, a whole one of steps")
    count = int(length) if epochs is None else configs.steps_from_epochs(epochs, order.steps_per_epoch)
    until = step + count if last is None else min(step + count, last)
    period = run.strategy.sync_period_steps
    if until % period and until != last:
        raise UsageError(
            f"train(): step {until} is between two syncs, which are {period} steps apart (sync_every_steps); train to "
            f"a multiple of {period}"
        )
    return until


def ending_signal(run: BaseRun) -> str | None:
    """Returns the signal that ended the last call, or came at its end, if any; clears Ctrl-C: the run may continue."""
    status = run.loop.status
    reason = status.agreed_stop.reason if status.agreed_stop else run.stop_request.reason
    if reason == "SIGINT" and run.strategy.num_hosts == 1:
        run.stop_request.reason = status.stop = status.agreed_stop = None
    return reason if reason in EXIT_CODES else None


def restore(run: BaseRun, which: str | int) -> None:
    """Restores the best checkpoint, the latest, or that of a step; the run continues from there, if it trains."""
    if not run.config.trains:
        list(restoring.restored(run, which))  # a live run may remove one meanwhile
        return
    checkpoints = run.checkpoints_for(which)
    checkpoints.join()  # one that is being written may be the one to restore
    manifest = restoring.find(run, checkpoints, which)
    restoring.check_position(run, manifest)
    saving.restore(checkpoints, run.state, run.hooks, manifest, meter=run.loop.meter)
    manifest.renew()  # else the next attempt would continue from a later one that was there
    run.loop.rewind()


def outcome(run: BaseRun, evaluates: bool = True) -> Outcome:
    """Returns the outcome of a run whose loop has ended.

    Restores the best weights, if the run is to end with them; the result's `eval` is of the weights that it ends
    with.

    Args:
      evaluates: whether the result has an evaluation that the run itself has not made.
    """
    reason, _, exit_code = run.loop.status.agreed_stop or Stop("")
    if EXIT_CODES.get(reason) == EXIT_TERMINATED and run.config.min_workers and not run.stop_request.reason:
        # Another host's notice of preemption: the agents decide whether this one continues without that.
        exit_code = EXIT_REGROUP
    exit_code = exit_code or EXIT_CODES.get(reason, 0)

    # Before an evaluation, which reads more of the data: these figures are of the training alone.
    result = run_result(run, train=run.history_hook.means(), resumed_from=run.resumed_from, **run.history_hook.rates())
    if bad_records := run.bad_records():
        result["bad_records"] = bad_records
    if tables := {name: int(value) for name, value in run.trainer.inventory.table_figures().items()}:
        result["tables"] = tables
        results.warn_of_full_tables(tables)

    evaluated, made, step = None, None, run.step
    if run.evaluates and not exit_code:
        # None was made at this step where the run was stopped between evaluations. And weights that callbacks have set
        # at their end are evaluated in any case.
        judges = (hook for hook in run.hooks if isinstance(hook, evaluation.Evaluation) and hook.step == step)
        made = next((hook.result for hook in judges), None)
        evaluated = None if run.final.changed else made
        if evaluated is None and (evaluates or run.final.changed):
            evaluated = _evaluate(run)
    if run.config.run_dir and run.config.is_chief and run.final.set_by_callbacks:
        logging.warning(
            "callbacks have set weights as training ended, and the checkpoint of step %d in %s has those before; keep "
            "these by run.model.save",
            step,
            run.config.configured_run_dir,
        )
    lines = []
    if evaluated is not None and (run.config.log_format == "text" or evaluated is not made):  # a program reads it once
        lines = [evaluation_line(step, evaluated, run.config.log_format)]
    best = next((hook for hook in run.hooks if isinstance(hook, Best) and hook.best_step is not None), None)
    ends_with_best = best is not None and run.config.restore_best and not exit_code
    if best and ends_with_best:  # the weights and their step; the run's checkpoints stay
        if isinstance(best, BestWeights):
            assert best.put_back  # there is a best value
            best.put_back()
        else:
            checkpoints = run.checkpoints_for("best")
            saving.restore(checkpoints, run.state, manifest=restoring.newest(run, checkpoints))
        evaluated = best.evaluation or _evaluate(run)
    if evaluated is not None:
        reports, class_tables = by_class(run, evaluated)
        result |= {"eval": evaluated, **evaluated.batches, **reports}
        lines += class_tables
    result["stop"] = run.loop.status.stop
    if best:
        result["best"] = {"metric": best.monitor, "value": best.best, "step": best.best_step}
        result["best"] |= {"eval": best.evaluation} if best.evaluation else {}
    if run.record:
        result["goodput"] = run.record.goodput()
    return Outcome(result, exit_code, [*lines, *_end_lines(run, result, exit_code, ends_with_best)])


def _evaluate(run: BaseRun) -> evaluation.Evaluated:
    config = run.config
    with run.timed_as("evaluation"):
        return evaluation.evaluate(run.strategy, run.state, batches=config.eval_batches, directory=config.run_dir)


def _end_lines(run: BaseRun, result: Mapping[str, Any], exit_code: int, ends_with_best: bool) -> Iterator[str]:
    """Describes how a run has ended, from its result."""
    stop = run.loop.status.agreed_stop
    if any(name.endswith("loss_with_penalties") for name in (*result["train"], *result.get("eval", ()))):
        yield "loss leaves out what layers add to it; loss_with_penalties, which is trained on, has it"
    if stop:
        line = f"stopped at step {result['step']}: {stop.reason if stop.exit_code else result['stop']}"
        config = run.config
        is_passed = config.trainer_class.is_built
        again = "command" if config.owns_process else "call"
        if not exit_code or exit_code == EXIT_REGROUP:
            yield line  # a hook has stopped it, or the next attempt continues it by itself
        elif config.run_dir:
            yield f"{line}; saved, and the same {again} resumes from {config.configured_run_dir}"
        elif is_passed:
            yield f"{line}; the model has the weights trained so far, and nothing else is kept"
        else:
            yield f"{line}; nothing is kept without run_dir"
    if size := run.state.input.num_bytes:
        yield f"the position in the training data takes {size / 1e6:,.3g} MB of a checkpoint"
    if best := result.get("best"):
        note = ", whose weights the model ends with" if ends_with_best else ""
        yield f"best {best['metric']} {best['value']:.6g} at step {best['step']}{note}"
    if "goodput" in result and run.config.run_dir:
        seconds = dict(result["goodput"]["seconds"])
        total, steps = seconds.pop("total"), seconds.pop("steps")
        rest = sorted(seconds, key=lambda kind: -seconds[kind])
        others = ", ".join(f"{kind} {duration(seconds[kind])}" for kind in rest if seconds[kind] >= 0.5)
        fraction = result["goodput"]["share"]
        line = f"goodput {fraction:.0%}: {duration(steps)} of {duration(total)} were steps that count"
        yield f"{line}; {others}" if others else line


def _first_lines(run: BaseRun, manifest: Manifest | None) -> list[str]:
    config, order, described = run.config, run.strategy.training.feed.order, run.strategy.describe()
    length = "no end" if run.train_steps is None else counted(run.train_steps, "step")
    epoch = f"{counted(order.num_examples, 'example')}, {counted(order.steps_per_epoch, 'step')} an epoch of"
    if not order.has_epochs:
        epoch = "examples that are not counted, batches of"
    lines = [
        f"{config.model_entry.name}: {epoch} {order.batch_size}, {length}; "
        f"{described['name']}, {counted(described['replicas'], 'replica')}"
    ]
    if config.cluster and (absent := config.cluster.absent):
        from ...parts.clusters.rendezvous import describe_peers

        now, step = config.cluster.num_workers, manifest.step if manifest else 0
        others = describe_peers(absent)
        lines.append(f"{now} of {now + len(absent)} workers continue from step {step:,}, without {others}")
    if manifest is None:
        return lines
    versions = manifest.versions.get("crankshaft"), version.described()
    builds = [re.sub(", commit [0-9a-f]+", "", str(described)) for described in versions]
    if len({*builds}) > 1:
        lines.append("{} was written by crankshaft {}, and this is {}".format(manifest.name, *builds))
    origin, before = order.origin, manifest.about["flags"]["global_batch_size"]
    if origin.step == manifest.step and before != order.batch_size:
        goes_on = config.learning_rate_schedule != "constant" or config.warmup_steps
        schedule = "; the learning-rate schedule continues by examples" if goes_on else ""
        lines.append(f"batch size {order.batch_size}, which was {before}, from epoch {origin.epoch + 1} on{schedule}")
    if run.train_steps is None:
        return [*lines, f"resumed at step {manifest.step:,} from {config.configured_run_dir}"]
    if manifest.step >= run.train_steps:
        more = "more steps or epochs continue it"
        if "train_steps" in config.deciding():
            more += f", with allow_changed_config: learning_rate_schedule={config.learning_rate_schedule} ends here"
        return [*lines, f"resumed at step {manifest.step:,}: this run is complete; {more}"]
    return [*lines, f"resumed at step {manifest.step:,} of {run.train_steps:,} from {config.configured_run_dir}"]
