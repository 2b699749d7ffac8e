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

from ...engine.checkpoints import CheckpointError, Manifest, RunDir
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
from ...engine.internals.errors import counted
from ...engine.loop import Loop
from ...engine.machine.pauses import Pauses
from ...engine.metrics.means import kinds_of
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
from .history import CallSums, History, Means, TrainMetrics
from .modes import as_line, by_class, result_of
from .progress import Progress, print_model_summary
from .session import Session, choose_jit

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
      session: the run, put together.
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

    def __init__(self, session: Session, user_hooks: Sequence, check_held: Callable[[], None] | None, began: float):
        self.session = session
        users = _checked(user_hooks)
        writing, looking = Writing(), Writing("looking")  # of which the first waits for the device, if that hangs too
        pauses, chief = Pauses(), session.strategy.is_chief
        self.record = recording.record(session, writing, looking, began, pauses) if chief else None
        periods = row_periods(session, users)
        self.history = History(self.record, periods)
        self.extra = Extra()
        self._stop_request = StopRequest()
        self.signals = Signals(self._stop_request.request, session.config.owns_process, is_kept=True)
        self._metrics = TrainMetrics(eval_period(session))
        self._call = CallSums()
        holding = [Holding(check_held)] if check_held else []
        runs_users = any(not isinstance(user, KerasCallbacks) or user.given for user in users)
        every, names = session.config.check_sync_every_steps, session.strategy.replica_names
        self._sync = [SyncCheck(every, names, periods, runs_users)] if session.strategy.num_replicas > 1 else []
        self._final = evaluation.FinalWeights(any(getattr(user, "given", ()) for user in users))
        own = [self._call, self._final, self.extra, self.history, *holding, *users, *self._sync]
        self._hooks = compose_hooks(session, own, self._metrics, self._stop_request, self.record, writing)
        self._hooks += asking.asked(session, self._hooks, self.record, self._stop_request, looking)
        self._manifest: Manifest | None = None
        self._is_ready = False
        self.loop = Loop(session.strategy, session.state, self._hooks, session.train_steps, pauses.clock)

    @property
    def stop(self) -> str | None:
        """Why the run trains no further; None while it does."""
        status = self.loop.status
        return status.stop or (f"step {status.step} is the last of the run" if status.last else None)

    def restore_newest(self) -> None:
        """Restores the run's latest checkpoint, if there is one, writes what the run is, and says it."""
        session, config = self.session, self.session.config
        self._manifest = restore(session, self._hooks)
        if config.writes_run:  # not before: a run that cannot be resumed stays what it is
            write_of_run(RunDir(config.run_dir).config, config.about())
            weights.write(session, config.run_dir)
        if session.speaks:
            held = Holdings(session.trainer)
            print_model_summary(held.models, tables=list(held.tables.values()))
        session.say(_first_line(session, self._manifest))
        if config.mode == "train_and_eval" and not session.evaluates:
            session.say("no evaluation data: no evaluation is made")
        for line in session.strategy.about():
            session.say(line)

    def make_ready(self) -> None:
        """Finds a mistake in the evaluation before the first step, and chooses whether steps are one XLA program."""
        session, steps = self.session, self.session.train_steps
        if self._is_ready or (steps is not None and session.state.step >= steps):
            return
        self._is_ready = True
        # A mistake in the evaluation shows now, not after an epoch.
        self._find_monitored(session.strategy.trace_evaluation() if session.evaluates else ())
        session.say(choose_jit(session))

    def _find_monitored(self, measured: Sequence[str]) -> None:
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
            self.session.say(f"monitored: {monitored.described()}")

    def check_sync(self) -> None:
        """Raises `OutOfSyncError` where replicas differ."""
        for hook in self._sync:
            hook.act(self.loop.status)

    def end_of(self, steps: int | None, epochs: float | None) -> int:
        """Returns the step up to which so many steps, or epochs, go: none past the run's end.

        Raises:
          UsageError: they are not a length, or the run has stopped.
        """
        step, last, order = self.session.state.step, self.session.train_steps, self.session.strategy.train_order
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
        period = self.session.strategy.sync_period_steps
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
        with lent.lending(self.session, split, trains=True, steps=steps):
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
        if reason == "SIGINT" and self.session.strategy.num_hosts == 1:
            self._stop_request.reason = status.stop = status.agreed_stop = None
        return reason if reason in EXIT_CODES else None

    def stop_by(self, signal_name: str) -> None:
        """Stops the run by a signal that came between two calls."""
        status = self.loop.status
        status.agreed_stop = status.agreed_stop or Stop(signal_name)
        status.stop = str(status.agreed_stop)

    def save(self) -> None:
        """Writes a checkpoint, in place of one of the same step, and waits until it is on the disk."""
        checkpoints = self.session.checkpoints
        with self._spending("checkpoints"):
            saving.save(checkpoints, self.loop.status, self._hooks, again=True)
            checkpoints.wait()

    def restore(self, which: str | int) -> None:
        """Restores the best checkpoint, the latest, or that of a step; the run goes on from there."""
        session = self.session
        checkpoints = session.best if which == "best" else session.checkpoints
        checkpoints.wait()
        manifest = reading.found(session, checkpoints, which)
        reading.check_position(session, manifest)
        self.extra.values = {}
        saving.restore(checkpoints, session.state, self._hooks, manifest)
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
        session, metrics, status = self.session, self._metrics, self.loop.status
        resumed_from = self._manifest.step if self._manifest else None
        means = metrics.means or metrics.window.steady_means()
        result = result_of(session, train=means, resumed_from=resumed_from, **metrics.rates())
        if session.bad_records:
            result["bad_records"] = counted_bad_records(session)
        if tables := {name: int(value) for name, value in Holdings(session.trainer).table_figures().items()}:
            result["tables"] = tables
            results.warn_of_full_tables(tables)
        exit_code = EXIT_CODES.get(status.agreed_stop.reason, 0) if status.agreed_stop else 0
        measured, lines = None, []
        if session.evaluates and not exit_code:
            changed = self._final.changed  # since the last evaluation
            measured = None if changed else _evaluation_of(session.state.step, self._hooks)
            if measured is None and (evaluates or changed):
                measured = self._evaluation()
            if measured is not None:
                lines.append(f"evaluation at step {session.state.step}: {as_line(measured)}")
        best, taken = _best_of(self._hooks), session.config.restore_best and not exit_code
        if best and taken:
            _restore_best(session, best)
            measured = best.evaluation or self._evaluation()
        if measured is not None:
            reports, shown = by_class(session, measured)
            result |= {"eval": measured, **reports}
            lines += shown
        return result, exit_code, lines + self._end(result, exit_code, best, taken)

    def _evaluation(self) -> evaluation.Evaluated:
        with self._spending("evaluation"):
            return evaluation.evaluate(self.session.strategy, self.session.state)

    def _end(self, result: dict[str, Any], exit_code: int, best: Best | None, taken: bool) -> list[str]:
        """Adds to the result how the run ended, and returns lines of it; `taken`: the model has the best weights."""
        config, status, lines = self.session.config, self.loop.status, []
        if "loss_with_penalties" in {**result["train"], **result.get("eval", {})}:
            lines.append("loss leaves out what layers add to it; loss_with_penalties, which is trained on, has it")
        result["stop"] = status.stop
        if status.stop:
            lines.append(f"stopped at step {result['step']}: {status.stop}")
        if size := self.session.state.input.num_bytes:
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


def counted_bad_records(session: Session) -> dict[str, int]:
    """Returns the number of records that were left out of each split, by any of the workers."""
    return {name: len(session.strategy.bad_records(source)) for name, source in session.bad_records.items()}


def _best_of(hooks: Sequence[Hook]) -> Best | None:
    """Returns the hook that keeps the best state, once there is a best state."""
    kept = (hook for hook in hooks if isinstance(hook, Best))
    return next((hook for hook in kept if hook.best_step is not None), None)


def _restore_best(session: Session, best: Best) -> None:
    """Restores the state, step included, of the best evaluation; the run's checkpoints stay."""
    if isinstance(best, BestWeights):
        best.put_back()
    else:
        saving.restore(session.best, session.state, manifest=reading.newest(session, session.best))


def compose_hooks(
    session: Session,
    user_hooks: Sequence[Hook],
    metrics: TrainMetrics,
    stop_request: StopRequest,
    record: Record | None,
    writing: Writing,
) -> list[Hook]:
    """Makes a run's hooks, in the order in which they act: those that judge, show, stop, and last those that save."""
    config = session.config
    hooks: list[Hook] = [numerics.NanGuard(), *_guards(session)]
    if session.evaluates:
        hooks.append(evaluation.Evaluation(eval_period(session)))
    hooks += [record] if record else []  # before any that saves: a window ends with what was done by then
    # Without evaluations, a metric of the training data is checked each epoch.
    evaluates = session.evaluates and eval_period(session)
    period: dict[str, Any] = {} if evaluates else {"every_steps": session.epoch_period}
    if config.early_stopping:
        hooks.append(EarlyStopping(config.monitor, **config.arguments("early_stopping"), **period))
    if config.reduce_lr:
        hooks.append(ReduceLearningRate(config.monitor, **config.arguments("reduce_lr"), **period))
    if session.best and session.evaluates:
        hooks.append(BestCheckpoint(session.best, config.monitor, hooks))
    elif config.restore_best:
        hooks.append(BestWeights(config.monitor))
    hooks += [metrics, *user_hooks]
    if config.run_dir:
        hooks.append(
            TensorBoard(
                RunDir(config.run_dir).tensorboard if config.is_chief else None,
                every_steps=config.summary_every_steps,
                histogram_every_steps=config.histogram_every_steps,
                more=row_periods(session, user_hooks) if config.summary_every_steps else (),
                config=config.deciding(),
                probe=Probe(session.strategy, session.trainer),
                writing=writing,
            )
        )
    hooks += [Progress(config.progress if config.is_chief else "off"), stop_request]
    if session.checkpoints:
        hooks.append(Checkpointing(session.checkpoints, config.checkpoint_every_steps, hooks))
    return hooks


def _guards(session: Session) -> list[Hook]:
    """Makes the hooks that watch workers, where there are several, and what they wait for."""
    strategy = session.strategy
    guards: list[Hook] = []
    if len(strategy.worker_names) > 1 and strategy.is_chief:
        guards.append(Stragglers(strategy.worker_names))
    guards.append(InputBound(session.faster_input))
    return guards


def restore(session: Session, hooks: Sequence[Hook]) -> Manifest | None:
    """Restores the run's latest checkpoint, or begins the run where there is none, not even a broken one."""
    manifest = None
    if session.checkpoints:
        session.checkpoints.clean()
        session.best.clean()
        newest = reading.newest(session, session.checkpoints)
        if newest is None and (problem := session.checkpoints.problem()):
            raise UsageError(_unreadable(session, problem))
        if newest is None:
            _check_beginning(session)
        else:
            _check_rules(session.config, newest)
            reading.check_same_run(session, newest)
            reading.check_position(session, newest)
            fingerprints.check_resumed(session.config, newest, session.checkpoints.about)
            replicas = session.strategy.num_replicas
            fingerprints.check_division(session.config, newest, session.checkpoints.about, replicas)
            if session.config.is_chief:
                threads.warn_of_others(newest, session.checkpoints.about)
            again = session.config.allow_changed_config
            manifest = saving.restore(session.checkpoints, session.state, hooks, newest, again)
    if manifest is None:
        weights.start(session)
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


def _unreadable(session: Session, problem: str) -> str:
    best, directory = session.best, session.checkpoints.directory
    weights = f"{best.directory} or other weights" if best.latest() else "other weights"
    return (
        f"no checkpoint in {directory} can be read ({problem}); restore it from a copy, or begin in another --run_dir, "
        f"from the start or, with --init_from, from {weights}"
    )


def _check_beginning(session: Session) -> None:
    """Raises `UsageError` where a run without a checkpoint shows that it had some; else it begins again.

    A best checkpoint alone may have been left by a process that was killed before it saved any other checkpoint.
    """
    best, run_dir = session.best.latest(), session.config.run_dir
    if best is None:
        return
    # The second regular save waits for the first, and at the same step the best checkpoint is saved before it.
    every = best.about.get("flags", {}).get("checkpoint_every_steps") or best.step
    if best.step > 2 * every or results.step_of(RunDir(run_dir).result):
        raise UsageError(
            f"--run_dir={run_dir} holds best/{best.name} of a run whose checkpoints/ are gone, so it can't be gone on "
            f"with; restore them from a copy, or use another --run_dir, with --init_from={session.best.directory} to "
            "train on from there"
        )
    if session.strategy.is_chief:
        logging.warning(
            "%s has no checkpoint but best/%s: the run begins again, and that one stays until there is a better one",
            *(run_dir, best.name),
        )


def eval_period(session: Session) -> int | Period:
    """Returns the period of evaluations."""
    period = session.config.eval_every_steps
    return session.epoch_period if period is None else period


def row_periods(session: Session, hooks: Sequence[Hook]) -> set[int | Period]:
    """Returns the periods at whose ends training metrics are written: an epoch's and an evaluation's."""
    of_callbacks = {hook.epoch_steps or 0 for hook in hooks if isinstance(hook, KerasCallbacks)}
    return {session.epoch_period, eval_period(session), *of_callbacks}


def _evaluation_of(step: int, hooks: Sequence[Hook]) -> evaluation.Evaluated | None:
    """Returns the evaluation made at this step; None where a run was stopped between evaluations."""
    made = (hook for hook in hooks if isinstance(hook, evaluation.Evaluation))
    return next((hook.result for hook in made if hook.step == step), None)


def _first_line(session: Session, manifest: Manifest | None) -> str:
    config, order, where = session.config, session.strategy.train_order, session.strategy.describe()
    length = "no end" if session.train_steps is None else counted(session.train_steps, "step")
    epoch = f"{counted(order.num_examples, 'example')}, {counted(order.steps_per_epoch, 'step')} an epoch of"
    if session.strategy.train_feed.is_endless:
        epoch = "examples that are not counted, batches of"
    text = (
        f"{config.model_entry.name}: {epoch} {order.batch_size}, {length}; "
        f"{where['name']}, {counted(where['replicas'], 'replica')}"
    )
    if manifest is None:
        return text
    text += _batch_size_line(session, manifest)
    if session.train_steps is None:
        return f"{text}\nresumed at step {manifest.step:,} from {config.given_run_dir}"
    if manifest.step >= session.train_steps:
        more = "with more --train_steps or --train_epochs it goes on"
        if "train_steps" in config.deciding():
            more += f", with --allow_changed_config: --learning_rate_schedule={config.learning_rate_schedule} ends here"
        return f"{text}\nresumed at step {manifest.step:,}: this run is complete; {more}"
    return f"{text}\nresumed at step {manifest.step:,} of {session.train_steps:,} from {config.given_run_dir}"


def _batch_size_line(session: Session, manifest: Manifest) -> str:
    """Returns a line that says how a run goes on whose batch size changes here; "" where it does not."""
    order = session.strategy.train_order
    origin, before = order.origin, manifest.about["flags"]["global_batch_size"]
    if origin.step != manifest.step or before == order.batch_size:
        return ""
    where = f"epoch {origin.epoch + 1}" if order.has_epochs else "the data"
    of = f" of {order.num_examples:,}" if order.has_epochs else ""
    line = f"\nbatch size {order.batch_size}, which was {before}: {where} goes on after {origin.place:,}{of} examples"
    if order.seen:
        line += f", with a first batch of {order.size_of(origin.step)}"
    if session.config.learning_rate_schedule != "constant" or session.config.warmup_steps:
        line += "; the learning rate's schedule goes on by examples"
    return line
