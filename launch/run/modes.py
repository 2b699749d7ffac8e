"""The work of each `--mode`, one function each, with everything put together already. Host code."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from ...engine import loop
from ...engine.checkpoints import Manifest
from ...engine.holdings import Holdings
from ...engine.hooks import Hook, Status, StopRequest, Windowed, evaluation, numerics, saving
from ...engine.hooks.base import Rates
from ...engine.hooks.input_bound import InputBound
from ...engine.hooks.monitors import EarlyStopping, Monitor, ReduceLearningRate, check_measured
from ...engine.hooks.saving import BestCheckpoint, BestWeights, Checkpointing
from ...engine.hooks.stragglers import Stragglers
from ...engine.hooks.sync_check import SyncCheck
from ...engine.hooks.tensorboard import TensorBoard
from ...engine.hooks.tensorboard.probe import Probe
from ...engine.internals.errors import counted
from ...engine.state import RULES
from ..command_line import config as configs
from ..command_line.config import Config
from ..errors import UsageError
from ..host import threads
from ..host.files import write_of_run
from ..host.process import EXIT_CODES, Signals
from . import export as exports
from . import fingerprints, reading, results, weights
from .history import History
from .progress import Progress, print_model_summary
from .session import Session, choose_jit


class TrainMetrics(Windowed):
    """The means of the last window (an epoch, or the time between evaluations), and the run's rate."""

    name = "train_metrics"

    def __init__(self, every_steps: int):
        super().__init__(every_steps, at_end=True)
        self.means: dict[str, float] = {}
        self._run = Rates(leaves_out_first=True)

    def __call__(self, status: Status) -> None:
        super().__call__(status)
        self._run.add(status)

    def act(self, status: Status) -> None:
        self.means = self.window.steady_means()

    def rates(self) -> dict[str, float | None]:
        """Returns the run's rates after the first call; of the first if it was all, None without a step."""
        return {"steps_per_sec": None, "examples_per_sec": None, **self._run.speeds, **self._run.input}

    def host_state(self) -> dict:
        return {**super().host_state(), "means": self.means}

    def restore_host_state(self, values: dict) -> None:
        super().restore_host_state(values)
        self.means = values.get("means", {})


class Holding(Hook):
    """Ends a run that has lost its run_dir, after the call in which that happened.

    Args:
      check: raises where the run_dir is another's, or gone.
    """

    name = "held_run_dir"

    def __init__(self, check: Callable[[], None]):
        self._check = check

    def begin(self, status: Status) -> None:
        self._check()

    def __call__(self, status: Status) -> None:
        self._check()

    def settle(self, status: Status) -> None:
        self._check()


def make_history(session: Session) -> History:
    """Makes the run's history, which the chief writes."""
    return History(session.config.run_dir if session.config.writes_run else None, _eval_period(session))


def train(session: Session, user_hooks: Sequence[Hook], history: History) -> tuple[dict[str, Any], int]:
    """Trains, from the run's latest checkpoint if there is one. Returns (result, exit code)."""
    config, state = session.config, session.state
    stop_request = StopRequest()
    metrics = TrainMetrics(_eval_period(session))
    hooks = compose_hooks(session, [history, *user_hooks], metrics, stop_request)
    manifest = restore(session, hooks)
    if config.writes_run:  # not before: a run that cannot be resumed stays what it is
        write_of_run(config.run_dir, configs.FILE_NAME, config.about())
        weights.write(session, config.run_dir)
    if session.speaks:
        held = Holdings(session.trainer)
        print_model_summary(held.models, tables=list(held.tables.values()))
    session.say(_first_line(session, manifest))
    if config.mode == "train_and_eval" and not session.evaluates:
        session.say("no evaluation data: no evaluation is made")
    for line in session.strategy.about():
        session.say(line)
    with contextlib.ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.close)
        stack.enter_context(Signals(stop_request.request, ends_process=config.owns_process))
        if state.step < session.train_steps:
            if session.evaluates:
                measured = session.strategy.trace_evaluation()  # a mistake in it shows now, not after an epoch
                if measured and config.monitor.startswith("eval_"):
                    check_measured(config.monitor, measured)
            session.say(choose_jit(session))
        status = loop.train(session.strategy, state, hooks, session.train_steps)
    result = result_of(
        session, train=metrics.means, resumed_from=manifest.step if manifest else None, **metrics.rates()
    )
    if session.bad_records:
        result["bad_records"] = counted_bad_records(session)
    if tables := {name: int(value) for name, value in Holdings(session.trainer).table_figures().items()}:
        result["tables"] = tables
        _warn_of_full_tables(tables)
    exit_code = EXIT_CODES.get(status.agreed_stop.reason, 0) if status.agreed_stop else 0
    if session.evaluates and not exit_code:
        result["eval"] = _evaluation_of(state.step, hooks) or evaluation.evaluate(session.strategy, session.state)
        session.say(f"evaluation at step {state.step}: {as_line(result['eval'])}")
    if "loss_with_penalties" in {**metrics.means, **result.get("eval", {})}:
        session.say("loss leaves out what layers add to it; loss_with_penalties, which is trained on, has it")
    if status.stop:
        result["stop"] = status.stop
        session.say(f"stopped at step {state.step}: {status.stop}")
    if size := state.input.num_bytes:
        session.say(f"the place in the training data takes {size / 1e6:,.3g} MB of a checkpoint")
    if best := _best_of(hooks):
        result["best"] = {"metric": best.monitor, "value": best.best, "step": best.best_step}
        taken = config.restore_best and not exit_code
        if taken:
            _restore_best(session, best)
        whose = ", whose weights the model ends with" if taken else ""
        session.say(f"best {best.monitor} {best.best:.6g} at step {best.best_step}{whose}")
    if exit_code:
        run_dir = config.given_run_dir
        session.say(f"the same command resumes from {run_dir}" if run_dir else "nothing is kept without --run_dir")
    return result, exit_code


def counted_bad_records(session: Session) -> dict[str, int]:
    """Returns the number of records that were left out of each split, by any of the workers."""
    return {name: len(session.strategy.bad_records(source)) for name, source in session.bad_records.items()}


def _best_of(hooks: Sequence[Hook]) -> Monitor | None:
    """Returns the hook that keeps the best state, once there is a best state."""
    kept = (hook for hook in hooks if isinstance(hook, (BestCheckpoint, BestWeights)))
    return next((hook for hook in kept if hook.best_step is not None), None)


def _restore_best(session: Session, best: Monitor) -> None:
    """Restores the state, step included, of the best evaluation; the run's checkpoints stay."""
    if isinstance(best, BestWeights):
        best.put_back()
    else:
        saving.restore(session.best, session.state, manifest=reading.newest(session, session.best))


def _warn_of_full_tables(tables: Mapping[str, int]) -> None:
    """Warns of each table that had no row left for an id that was to be admitted."""
    for name in sorted({name.rpartition("/")[0] for name in tables}):
        given, turned_away = (tables[f"{name}/{figure}"] for figure in ("rows_given", "turned_away"))
        if turned_away:
            logging.warning(
                "table %s: %s rows are given, and %s times an id found none free and shared row 0; "
                "give the table more rows, or raise admit_after",
                *(name, f"{given:,}", f"{turned_away:,}"),
            )


def compose_hooks(
    session: Session, user_hooks: Sequence[Hook], metrics: TrainMetrics, stop_request: StopRequest
) -> list[Hook]:
    """Makes a run's hooks, in the order in which they act: those that judge, show, stop, and last those that save."""
    config = session.config
    hooks: list[Hook] = [numerics.NanGuard(), *_guards(session)]
    if session.evaluates:
        hooks.append(evaluation.Evaluation(_eval_period(session)))
    # Without evaluations, a metric of the training data is checked each epoch.
    evaluates = session.evaluates and _eval_period(session)
    period = {} if evaluates else {"every_steps": session.epoch_period}
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
                os.path.join(config.run_dir, "tensorboard") if config.is_chief else None,
                every_steps=config.summary_every_steps,
                histogram_every_steps=config.histogram_every_steps,
                config=config.deciding(),
                probe=Probe(session.strategy, session.trainer),
            )
        )
    hooks += [Progress(config.progress if config.is_chief else "off"), stop_request]
    if session.checkpoints:
        hooks.append(Checkpointing(session.checkpoints, config.checkpoint_every_steps, hooks))
    return hooks


def _guards(session: Session) -> list[Hook]:
    """Makes the hooks that watch replicas and workers, where there are several, and what they wait for."""
    strategy, names = session.strategy, session.strategy.replica_names
    guards: list[Hook] = []
    if strategy.num_replicas > 1 and session.config.check_sync_every_steps:
        guards.append(SyncCheck(session.config.check_sync_every_steps, names))
    if strategy.num_hosts > 1 and strategy.is_chief:
        guards.append(Stragglers(strategy.host_names))
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
        f"anew or, with --init_from, from {weights}"
    )


def _check_beginning(session: Session) -> None:
    """Raises `UsageError` where a run without a checkpoint shows that it had some; else it begins anew.

    A best checkpoint alone may have been left by a process that was killed before it saved any other checkpoint.
    """
    best, run_dir = session.best.latest(), session.config.run_dir
    if best is None:
        return
    # The second regular save waits for the first, and at the same step the best checkpoint is saved before it.
    every = best.about.get("flags", {}).get("checkpoint_every_steps") or best.step
    if best.step > 2 * every or results.step_of(os.path.join(run_dir, "result.json")):
        raise UsageError(
            f"--run_dir={run_dir} holds best/{best.name} of a run whose checkpoints/ are gone, so it can't be gone on "
            f"with; restore them from a copy, or use another --run_dir, with --init_from={session.best.directory} to "
            "train on from there"
        )
    if session.strategy.is_chief:
        logging.warning(
            "%s has no checkpoint but best/%s: the run begins anew, and that one stays until there is a better one",
            *(run_dir, best.name),
        )


def evaluate(session: Session) -> tuple[dict[str, Any], int]:
    """Evaluates checkpoints of a run: the latest, the best, all, or that of one step."""
    results: dict[int, dict[str, float]] = {}
    for manifest in reading.restored(session):
        if not results and session.trainer.given.vocabulary:
            fingerprints.warn_of_ids(session.config, manifest, session.checkpoints.about)
        results[manifest.step] = evaluation.evaluate(session.strategy, session.state)
        session.say(f"evaluation at step {manifest.step}: {as_line(results[manifest.step])}")
    result = result_of(session, eval=results[session.state.step])
    if len(results) > 1:
        result["evals"] = {str(step): metrics for step, metrics in results.items()}
    return result, 0


def export(session: Session) -> tuple[dict[str, Any], int]:
    """Writes the model of the latest (or chosen) checkpoint as a SavedModel or Keras file."""
    for manifest in reading.restored(session):
        taken = f"{'best' if session.config.eval_checkpoint == 'best' else 'checkpoints'}/{manifest.name}"
    numerics.check_weights(session.trainer, f"step {session.state.step}")
    config = session.config
    session.known = weights.about(config.run_dir).known  # the model's, whatever the data has come to be
    path = exports.save(session, config.export_folder, config.export_format)
    kind = {"saved_model": "SavedModel", "keras": "Keras model"}[config.export_format]
    session.say(f"{kind} of step {session.state.step}, {taken}: {path}")
    return {**result_of(session), "export": path, "checkpoint": taken}, 0


def _eval_period(session: Session) -> int:
    asked = session.config.eval_every_steps
    return session.epoch_period if asked is None else asked


def _evaluation_of(step: int, hooks: Sequence[Hook]) -> dict[str, float] | None:
    """Returns the evaluation made at this step; None where a run was stopped between evaluations."""
    made = (hook for hook in hooks if isinstance(hook, evaluation.Evaluation))
    return next((hook.result for hook in made if hook.step == step), None)


def as_line(metrics: Mapping[str, float]) -> str:
    """Formats metrics for people, sorted by name."""
    return ", ".join(f"{name} {value:.6g}" for name, value in sorted(metrics.items()))


def _first_line(session: Session, manifest: Manifest | None) -> str:
    config, order, where = session.config, session.strategy.train_order, session.strategy.describe()
    text = (
        f"{config.model_entry.name}: {counted(order.num_examples, 'example')}, "
        f"{counted(order.steps_per_epoch, 'step')} an epoch of {order.batch_size}, "
        f"{counted(session.train_steps, 'step')}; {where['name']}, {counted(where['replicas'], 'replica')}"
    )
    if manifest is None:
        return text
    if manifest.step >= session.train_steps:
        more = "with more --train_steps or --train_epochs it goes on"
        if "train_steps" in config.deciding():
            more += f", with --allow_changed_config: --learning_rate_schedule={config.learning_rate_schedule} ends here"
        return f"{text}\nresumed at step {manifest.step:,}: this run is complete; {more}"
    return f"{text}\nresumed at step {manifest.step:,} of {session.train_steps:,} from {config.given_run_dir}"


def result_of(session: Session, **more) -> dict[str, Any]:
    """Returns what every mode's result begins with, and `more`."""
    config, where = session.config, session.strategy.describe()
    return {
        "mode": config.mode,
        "model": config.model_entry.name,
        "input": config.input_entry.name if config.input_entry else None,
        "strategy": config.strategy,
        "num_replicas": where["replicas"],
        "step": session.state.step,
        "jit": False if session.strategy.without_jit else session.state.jit,
        "precision": config.precision,
        "run_dir": config.run_dir,
        **({"classes": [*session.known.classes]} if session.known.classes else {}),
        **session.strategy.report(),
        **more,
    }
