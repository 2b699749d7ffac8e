"""A run that trains: from its latest checkpoint on, as many steps as are asked for, to its end. Host code."""

from __future__ import annotations

import contextlib
import json
import math
import numbers
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from ...engine.checkpoints import Manifest, RunDir
from ...engine.checkpoints import manifest as manifests
from ...engine.holdings import Holdings
from ...engine.hooks import Hook, StopRequest, evaluation, numerics, saving
from ...engine.hooks.base import Period, Window
from ...engine.hooks.input_bound import InputBound
from ...engine.hooks.keras_callbacks import KerasCallbacks
from ...engine.hooks.monitors import EarlyStopping, Monitor, ReduceLearningRate, reset_patience
from ...engine.hooks.record import Record
from ...engine.hooks.saving import Best, BestCheckpoint, BestWeights, Checkpointing, Holding
from ...engine.hooks.stragglers import Stragglers
from ...engine.hooks.sync_check import SyncCheck
from ...engine.hooks.tensorboard import TensorBoard
from ...engine.hooks.tensorboard.probe import Probe
from ...engine.hooks.writing import Writing
from ...engine.internals.errors import CheckpointError, counted
from ...engine.loop import Loop
from ...engine.machine.pauses import Pauses
from ...engine.metrics.sums import RowSpec, kinds_of
from ...engine.state import RULES
from ...engine.strategies.base import Stop
from .. import explanations
from ..command_line import config as configs
from ..command_line.config import Config
from ..errors import UsageError
from ..host import threads
from ..host.files import write_of_run
from ..host.signals import EXIT_CODES, Signals
from . import asking, fingerprints, lent, reading, recording, results, weights
from .base import BaseRun, choose_jit
from .history import CallSums, History, Means, TrainMetrics
from .modes import as_line, by_class, result_of
from .progress import Progress, print_model_summary

_MOST_EXTRA_BYTES = 1 << 20


class Extra(Hook):
    """Keeps with each checkpoint what the program has to keep beside the run's state.

    Attributes:
      values: plain JSON, by name.
    """

    name = "extra"

    def __init__(self):
        self.values: dict[str, Any] = {}

    def host_state(self) -> dict:
        self.check()  # the program may have changed them since they were set
        return {"values": self.values} if self.values else {}

    def restore_host_state(self, values: dict) -> None:
        if not isinstance(values["values"], dict):
            raise TypeError(f"it is of type {type(values['values']).__name__}, not a dictionary")
        self.values = values["values"]

    def check(self) -> None:
        """Raises `UsageError` unless a run that resumes would get the values back, and they are few."""
        kept = Extra()
        try:
            text = json.dumps(self.values, allow_nan=False)
            hooks = manifests.as_read({}, {"hooks": {self.name: {"values": self.values}}})["host_state"]["hooks"]
            kept.restore_host_state(hooks[self.name])
            if kept.values != _with_lists(self.values):
                raise ValueError("its keys are not all text")
        except (CheckpointError, TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"extra={reprlib.repr(self.values)} can't be kept with a checkpoint ({error}); give a dictionary by "
                "names, of numbers, text, and lists and dictionaries of them"
            ) from None
        if len(text) > _MOST_EXTRA_BYTES:
            raise UsageError(
                f"extra takes {len(text):,} bytes, and a checkpoint keeps {_MOST_EXTRA_BYTES:,} at most; write a file "
                "beside the run, and keep its name"
            )


def _with_lists(value: Any) -> Any:
    """Returns plain JSON with lists in the place of tuples."""
    if isinstance(value, dict):
        return {name: _with_lists(each) for name, each in value.items()}
    return [*map(_with_lists, value)] if isinstance(value, (list, tuple)) else value


class Training:
    """A run that trains: `restore_newest` and `begin` once, then `train_to`, `save` and `restore`, and `outcome` once.

    Args:
      run: the run, put together.
      user_hooks: Keras callbacks may be among them.
      check_held: raises where the run_dir is not this run's any more; None without one.
      began: when the process began to work on the run, by `time.monotonic`.

    Attributes:
      loop: the outer loop.
      record: writes the run's events; None of workers but the chief.
      signals: the context in which a signal ends `train_to` at a step; what then becomes of the run is the caller's.
      history: the rows of metrics.
      extra: what the program keeps with each checkpoint.
    """

    def __init__(self, run: BaseRun, user_hooks: Sequence, check_held: Callable[[], None] | None, began: float):
        self.run = run
        users = _checked(user_hooks)
        writing, looking = Writing(), Writing("looking")  # of which the first waits for the device, if that hangs too
        pauses, chief = Pauses(), run.strategy.is_chief
        self.record = recording.record(run, writing, looking, began, pauses) if chief else None
        periods = row_periods(run, users)
        self.history = History(self.record, periods)
        self.extra = Extra()
        self._stop_request = StopRequest()
        self.signals = Signals(self._stop_request.request, run.config.owns_process, is_kept=True)
        self._metrics = TrainMetrics(eval_period(run))
        self._call = CallSums()
        holding = [Holding(check_held)] if check_held else []
        runs_users = any(not isinstance(user, KerasCallbacks) or user.given for user in users)
        every, names = run.config.check_sync_every_steps, run.strategy.replica_names
        self._sync = [SyncCheck(every, names, periods, runs_users)] if run.strategy.num_replicas > 1 else []
        self._final = evaluation.FinalWeights(any(getattr(user, "given", ()) for user in users))
        own = [self._call, self._final, self.extra, self.history, *holding, *users, *self._sync]
        self._hooks = compose_hooks(run, own, self._metrics, self._stop_request, self.record, writing)
        self._hooks += asking.asked(run, self._hooks, self.record, self._stop_request, looking)
        self._manifest: Manifest | None = None
        self._is_ready = False
        self.loop = Loop(run.strategy, run.state, self._hooks, run.train_steps, pauses.clock)

    @property
    def stop(self) -> str | None:
        """Why the run trains no further; None while it does."""
        status = self.loop.status
        return status.stop or (f"step {status.step} is the last of the run" if status.last else None)

    def restore_newest(self) -> None:
        """Restores the run's latest checkpoint, if there is one, writes what the run is, and says it."""
        run, config = self.run, self.run.config
        self._manifest = restore(run, self._hooks)
        if config.writes_run:  # not before: a run that cannot be resumed stays what it is
            write_of_run(RunDir(config.run_dir).config, config.about())
            weights.write(run, config.run_dir)
        if run.speaks:
            held = Holdings(run.trainer)
            print_model_summary(held.models, tables=list(held.tables.values()))
        run.say(_first_line(run, self._manifest))
        if config.mode == "train_and_eval" and not run.evaluates:
            run.say("no evaluation data: no evaluation is made")
        for line in run.strategy.about():
            run.say(line)

    def make_ready(self) -> None:
        """Finds a mistake in the evaluation before the first step, and chooses whether steps are one XLA program."""
        run, steps = self.run, self.run.train_steps
        if self._is_ready or (steps is not None and run.state.step >= steps):
            return
        self._is_ready = True
        # A mistake in the evaluation shows now, not after an epoch.
        self._find_monitored(run.strategy.trace_evaluation() if run.evaluates else ())
        run.say(choose_jit(run))

    def _find_monitored(self, measured: Sequence[RowSpec]) -> None:
        """Finds the metrics that hooks monitor among the rows of an evaluation, and says which they are.

        Without an evaluation those of training are found once a step is traced.
        """
        kinds, monitors = kinds_of(measured), [hook for hook in self._hooks if isinstance(hook, Monitor)]
        for hook in monitors:
            if hook.monitored.source == "eval" or hook.monitored.find(kinds):
                hook.resolve(kinds)
        for callbacks in (hook for hook in self._hooks if isinstance(hook, KerasCallbacks)):
            callbacks.resolve(kinds)
        for monitored in dict.fromkeys(hook.monitored.by_name for hook in monitors):
            self.run.say(f"monitored: {monitored.described()}")

    def check_sync(self) -> None:
        """Raises `OutOfSyncError` where replicas differ."""
        for hook in self._sync:
            hook.act(self.loop.status)

    def end_of(self, steps: int | None, epochs: float | None) -> int:
        """Returns the step up to which so many steps, or epochs, go: none past the run's end.

        Raises:
          UsageError: they are not a length, or the run has stopped.
        """
        step, last, order = self.run.state.step, self.run.train_steps, self.run.strategy.train_order
        if self.stop:
            cure = "look at run.stop before each call; after early stopping, reset_patience() lets it go on"
            raise UsageError(f"train(): the run has stopped ({self.stop}); {cure}")
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
        taken = int(length) if epochs is None else configs.steps_of(epochs, order.steps_per_epoch)
        until = step + taken if last is None else min(step + taken, last)
        period = self.run.strategy.sync_period_steps
        if until % period and until != last:
            raise UsageError(
                f"train(): step {until} is between two syncs, which are {period} steps apart (--sync_every_steps); "
                f"train to a multiple of {period}"
            )
        return until

    def train(self, steps: int | None, epochs: float | None, split=None) -> Means:
        """Trains for so many steps, or epochs, on the run's own data or on what is lent to it; see `Run.train`."""
        if split is None:
            until = self.end_of(steps, epochs)
            with self.signals:
                self.make_ready()
                return self.train_to(until)
        with lent.lending(self.run, split, trains=True, steps=steps):
            until = self.end_of(steps, epochs)
            with self.signals:
                return self.train_to(until)

    def train_to(self, step: int) -> Means:
        """Trains up to a step, or to where the run stops; returns the means of the metrics of these steps."""
        self._call.window = window = Window()
        self.loop.train_to(step)
        return Means(window)

    def take_signal(self) -> str | None:
        """Returns the signal that ended the last call, or came at its end, if any; after Ctrl-C the run may go on."""
        status = self.loop.status
        reason = status.agreed_stop.reason if status.agreed_stop else self._stop_request.reason
        if reason == "SIGINT" and self.run.strategy.num_hosts == 1:
            self._stop_request.reason = status.stop = status.agreed_stop = None
        return reason if reason in EXIT_CODES else None

    def stop_by(self, signal_name: str) -> None:
        """Stops the run by a signal that came between two calls."""
        status = self.loop.status
        status.agreed_stop = status.agreed_stop or Stop(signal_name)
        status.stop = str(status.agreed_stop)

    def save(self) -> None:
        """Writes a checkpoint, in place of one of the same step, and waits until it is on the disk."""
        checkpoints = self.run.checkpoints
        with self._spending("checkpoints"):
            saving.save(checkpoints, self.loop.status, self._hooks, again=True)
            checkpoints.wait()

    def restore(self, which: str | int) -> None:
        """Restores the best checkpoint, the latest, or that of a step; the run goes on from there."""
        run = self.run
        checkpoints = run.best if which == "best" else run.checkpoints
        checkpoints.wait()
        manifest = reading.found(run, checkpoints, which)
        reading.check_position(run, manifest)
        self.extra.values = {}
        saving.restore(checkpoints, run.state, self._hooks, manifest)
        self.loop.rewind()

    def reset_patience(self) -> None:
        if reset_patience(self._hooks):
            self.loop.go_on()

    def outcome(self, evaluates: bool = True) -> tuple[dict[str, Any], int, list[str]]:
        """Returns (result, exit code, lines for people) of a run whose loop has ended.

        Restores the best weights, if the run is to end with them; the result's `eval` is of the weights that it ends
        with.

        Args:
          evaluates: whether the result has an evaluation that the run itself has not made.
        """
        run, metrics, status = self.run, self._metrics, self.loop.status
        resumed_from = self._manifest.step if self._manifest else None
        means = metrics.means or metrics.window.steady_means()
        result = result_of(run, train=means, resumed_from=resumed_from, **metrics.rates())
        if bad_records := run.bad_records():
            result["bad_records"] = bad_records
        if tables := {name: int(value) for name, value in Holdings(run.trainer).table_figures().items()}:
            result["tables"] = tables
            results.warn_of_full_tables(tables)
        exit_code = EXIT_CODES.get(status.agreed_stop.reason, 0) if status.agreed_stop else 0
        measured, lines = None, []
        if run.evaluates and not exit_code:
            changed = self._final.changed  # since the last evaluation
            measured = None if changed else _evaluation_of(run.state.step, self._hooks)
            if measured is None and (evaluates or changed):
                measured = self._evaluation()
            if measured is not None:
                lines.append(f"evaluation at step {run.state.step}: {as_line(measured)}")
        best, taken = _best_of(self._hooks), run.config.restore_best and not exit_code
        if best and taken:
            _restore_best(run, best)
            measured = best.evaluation or self._evaluation()
        if measured is not None:
            reports, shown = by_class(run, measured)
            result |= {"eval": measured, **reports}
            lines += shown
        return result, exit_code, lines + self._end(result, exit_code, best, taken)

    def _evaluation(self) -> evaluation.Evaluated:
        with self._spending("evaluation"):
            return evaluation.evaluate(self.run.strategy, self.run.state)

    def _end(self, result: dict[str, Any], exit_code: int, best: Best | None, taken: bool) -> list[str]:
        """Adds to the result how the run ended, and returns lines of it; `taken`: the model has the best weights."""
        config, status, lines = self.run.config, self.loop.status, []
        if "loss_with_penalties" in {**result["train"], **result.get("eval", {})}:
            lines.append("loss leaves out what layers add to it; loss_with_penalties, which is trained on, has it")
        result["stop"] = status.stop
        if status.stop:
            lines.append(f"stopped at step {result['step']}: {status.stop}")
        if size := self.run.state.input.num_bytes:
            lines.append(f"the place in the training data takes {size / 1e6:,.3g} MB of a checkpoint")
        if best:
            result["best"] = {"metric": best.monitor, "value": best.best, "step": best.best_step}
            result["best"] |= {"eval": best.evaluation} if best.evaluation else {}
            whose = ", whose weights the model ends with" if taken else ""
            lines.append(f"best {best.monitor} {best.best:.6g} at step {best.best_step}{whose}")
        if exit_code:
            run_dir = config.given_run_dir
            lines.append(f"the same command resumes from {run_dir}" if run_dir else "nothing is kept without --run_dir")
        if self.record:
            result["goodput"] = goodput = self.record.goodput()
            if config.run_dir:
                lines.append(recording.goodput_line(goodput))
        return lines

    def finish(self, error: BaseException | None, code: int) -> None:
        """Records how the run ended: with an exit code, or by an error."""
        if self.record is None:
            return
        stop, line = self.loop.status.stop, None
        if isinstance(error, Exception):
            code, line = explanations.explain(error, has_debug=False)
        elif error is not None:
            code, line = EXIT_CODES["SIGINT"], type(error).__name__
        self.record.finish(line or stop or "done", code, is_fault=isinstance(error, Exception))

    def _spending(self, kind: str) -> contextlib.AbstractContextManager[None]:
        return self.record.spending(kind) if self.record else contextlib.nullcontext()

    def close(self) -> None:
        """Releases what hooks hold, however the run ended."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.signals.close)
            for hook in self._hooks:
                stack.callback(hook.close)


def _checked(user_hooks: Sequence) -> list[Hook]:
    """Returns the user's hooks; Keras callbacks become one, the last. Raises `UsageError` for what is neither."""
    if not isinstance(user_hooks, Sequence):
        raise UsageError(f"hooks={user_hooks!r} is not a list; put hooks into one, hooks=[...]")
    callbacks = [hook for hook in user_hooks if isinstance(hook, tf.keras.callbacks.Callback)]
    others = [hook for hook in user_hooks if hook not in callbacks]
    for hook in others:
        if not isinstance(hook, Hook):
            raise UsageError(
                f"hook {hook!r} is neither an engine.hooks.Hook nor a Keras callback; wrap a function by every_epoch "
                "or every_steps"
            )
    return [*others, KerasCallbacks(callbacks)] if callbacks else others


def _best_of(hooks: Sequence[Hook]) -> Best | None:
    """Returns the hook that keeps the best state, once there is a best state."""
    kept = (hook for hook in hooks if isinstance(hook, Best))
    return next((hook for hook in kept if hook.best_step is not None), None)


def _restore_best(run: BaseRun, best: Best) -> None:
    """Restores the state, step included, of the best evaluation; the run's checkpoints stay."""
    if isinstance(best, BestWeights):
        best.put_back()
    else:
        saving.restore(run.best, run.state, manifest=reading.newest(run, run.best))


def compose_hooks(
    run: BaseRun,
    user_hooks: Sequence[Hook],
    metrics: TrainMetrics,
    stop_request: StopRequest,
    record: Record | None,
    writing: Writing,
) -> list[Hook]:
    """Makes a run's hooks, in the order in which they act: those that judge, show, stop, and last those that save."""
    config = run.config
    hooks: list[Hook] = [numerics.NanGuard(), *_guards(run)]
    if run.evaluates:
        hooks.append(evaluation.Evaluation(eval_period(run)))
    hooks += [record] if record else []  # before any that saves: a window ends with what was done by then
    # Without evaluations, a metric of the training data is checked each epoch.
    evaluates = run.evaluates and eval_period(run)
    period: dict[str, Any] = {} if evaluates else {"every_steps": run.epoch_period}
    if config.early_stopping:
        hooks.append(EarlyStopping(config.monitor, **config.arguments("early_stopping"), **period))
    if config.reduce_lr:
        hooks.append(ReduceLearningRate(config.monitor, **config.arguments("reduce_lr"), **period))
    if run.best and run.evaluates:
        hooks.append(BestCheckpoint(run.best, config.monitor, hooks))
    elif config.restore_best:
        hooks.append(BestWeights(config.monitor))
    hooks += [metrics, *user_hooks]
    if config.run_dir:
        hooks.append(
            TensorBoard(
                RunDir(config.run_dir).tensorboard if config.is_chief else None,
                every_steps=config.summary_every_steps,
                histogram_every_steps=config.histogram_every_steps,
                more=row_periods(run, user_hooks) if config.summary_every_steps else (),
                config=config.deciding(),
                probe=Probe(run.strategy, run.trainer),
                writing=writing,
            )
        )
    hooks += [Progress(config.progress if config.is_chief else "off"), stop_request]
    if run.checkpoints:
        hooks.append(Checkpointing(run.checkpoints, config.checkpoint_every_steps, hooks))
    return hooks


def _guards(run: BaseRun) -> list[Hook]:
    """Makes the hooks that watch workers, where there are several, and what they wait for."""
    strategy = run.strategy
    guards: list[Hook] = []
    if len(strategy.worker_names) > 1 and strategy.is_chief:
        guards.append(Stragglers(strategy.worker_names))
    guards.append(InputBound(run.inputs.faster))
    return guards


def restore(run: BaseRun, hooks: Sequence[Hook]) -> Manifest | None:
    """Restores the run's latest checkpoint, or begins the run where there is none, not even a broken one."""
    manifest = None
    if run.checkpoints:
        run.checkpoints.clean()
        run.best.clean()
        newest = reading.newest(run, run.checkpoints)
        if newest is None and (problem := run.checkpoints.problem()):
            raise UsageError(_unreadable(run, problem))
        if newest is None:
            _check_beginning(run)
        else:
            _check_rules(run.config, newest)
            reading.check_same_run(run, newest)
            reading.check_position(run, newest)
            fingerprints.check_resumed(run.config, newest, run.checkpoints.about)
            replicas = run.strategy.num_replicas
            fingerprints.check_division(run.config, newest, run.checkpoints.about, replicas)
            if run.config.is_chief:
                threads.warn_of_others(newest, run.checkpoints.about)
            again = run.config.allow_changed_config
            manifest = saving.restore(run.checkpoints, run.state, hooks, newest, again)
    if manifest is None:
        weights.start(run)
    return manifest


def _check_rules(config: Config, manifest: Manifest) -> None:
    """Raises `UsageError` or warns where a run was begun by other rules of shuffling and updating: its bits differ."""
    if (before := saving.rules_of(manifest)) == RULES:
        return
    what = f"--run_dir={config.run_dir} was begun by rules {before} of shuffling and updating, and these are {RULES}"
    if not config.allow_changed_config:
        raise UsageError(
            f"{what}: its numbers would not be those of one run; use another --run_dir, the version that began it, or "
            "--allow_changed_config"
        )
    if config.is_chief:
        logging.warning("%s: it goes on by these", what)


def _unreadable(run: BaseRun, problem: str) -> str:
    best, directory = run.best, run.checkpoints.directory
    weights = f"{best.directory} or other weights" if best.latest() else "other weights"
    return (
        f"no checkpoint in {directory} can be read ({problem}); restore it from a copy, or begin in another --run_dir, "
        f"from the start or, with --init_from, from {weights}"
    )


def _check_beginning(run: BaseRun) -> None:
    """Raises `UsageError` where a run without a checkpoint shows that it had some; else it begins again.

    A best checkpoint alone may have been left by a process that was killed before it saved any other checkpoint.
    """
    best, run_dir = run.best.latest(), run.config.run_dir
    if best is None:
        return
    # The second regular save waits for the first, and at the same step the best checkpoint is saved before it.
    every = best.about.get("flags", {}).get("checkpoint_every_steps") or best.step
    if best.step > 2 * every or results.step_of(RunDir(run_dir).result):
        raise UsageError(
            f"--run_dir={run_dir} holds best/{best.name} of a run whose checkpoints/ are gone, so it can't be gone on "
            f"with; restore them from a copy, or use another --run_dir, with --init_from={run.best.directory} to "
            "train on from there"
        )
    if run.strategy.is_chief:
        logging.warning(
            "%s has no checkpoint but best/%s: the run begins again, and that one stays until there is a better one",
            *(run_dir, best.name),
        )


def eval_period(run: BaseRun) -> int | Period:
    """Returns the period of evaluations."""
    period = run.config.eval_every_steps
    return run.epoch_period if period is None else period


def row_periods(run: BaseRun, hooks: Sequence[Hook]) -> set[int | Period]:
    """Returns the periods at whose ends training metrics are written: an epoch's and an evaluation's."""
    of_callbacks = {hook.epoch_steps or 0 for hook in hooks if isinstance(hook, KerasCallbacks)}
    return {run.epoch_period, eval_period(run), *of_callbacks}


def _evaluation_of(step: int, hooks: Sequence[Hook]) -> evaluation.Evaluated | None:
    """Returns the evaluation made at this step; None where a run was stopped between evaluations."""
    made = (hook for hook in hooks if isinstance(hook, evaluation.Evaluation))
    return next((hook.result for hook in made if hook.step == step), None)


def _first_line(run: BaseRun, manifest: Manifest | None) -> str:
    config, order, where = run.config, run.strategy.train_order, run.strategy.describe()
    length = "no end" if run.train_steps is None else counted(run.train_steps, "step")
    epoch = f"{counted(order.num_examples, 'example')}, {counted(order.steps_per_epoch, 'step')} an epoch of"
    if run.strategy.train_feed.is_endless:
        epoch = "examples that are not counted, batches of"
    text = (
        f"{config.model_entry.name}: {epoch} {order.batch_size}, {length}; "
        f"{where['name']}, {counted(where['replicas'], 'replica')}"
    )
    if manifest is None:
        return text
    text += _batch_size_line(run, manifest)
    if run.train_steps is None:
        return f"{text}\nresumed at step {manifest.step:,} from {config.given_run_dir}"
    if manifest.step >= run.train_steps:
        more = "with more --train_steps or --train_epochs it goes on"
        if "train_steps" in config.deciding():
            more += f", with --allow_changed_config: --learning_rate_schedule={config.learning_rate_schedule} ends here"
        return f"{text}\nresumed at step {manifest.step:,}: this run is complete; {more}"
    return f"{text}\nresumed at step {manifest.step:,} of {run.train_steps:,} from {config.given_run_dir}"


def _batch_size_line(run: BaseRun, manifest: Manifest) -> str:
    """Returns a line that says how a run goes on whose batch size changes here; "" where it does not."""
    order = run.strategy.train_order
    origin, before = order.origin, manifest.about["flags"]["global_batch_size"]
    if origin.step != manifest.step or before == order.batch_size:
        return ""
    where = f"epoch {origin.epoch + 1}" if order.has_epochs else "the data"
    of = f" of {order.num_examples:,}" if order.has_epochs else ""
    line = f"\nbatch size {order.batch_size}, which was {before}: {where} goes on after {origin.place:,}{of} examples"
    if order.seen:
        line += f", with a first batch of {order.size_of(origin.step)}"
    if run.config.learning_rate_schedule != "constant" or run.config.warmup_steps:
        line += "; the learning rate's schedule goes on by examples"
    return line
