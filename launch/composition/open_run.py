"""A run as an object: its calls, and how it stays open between them and closes."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import itertools
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import tensorflow as tf

from ...engine import logging
from ...engine.checkpoints.manifest import check_extra
from ...engine.data.streamed import Stream
from ...engine.hooks import saving
from ...engine.hooks.monitors import reset_patience
from ...engine.strategies.base import Interrupted, Stop, closing_feeds
from ...engine.trainer import Trainer
from ...runner import explanations
from ...runner.base import BaseRun
from ...runner.failures import UsageError
from ...runner.history import HistoryEntries, Means
from ...runner.host import exits
from ...runner.host.isolation import Isolation
from ...runner.host.signals import EXIT_CODES, Standby
from ...runner.modes import evaluate, external
from ...runner.modes.outcome import Outcome
from ...runner.restored import weights
from ...runner.results import RunOutcomeWriter
from . import training


class _InProgress(NamedTuple):
    """A call in progress, in a thread; `shares`: whether those of other threads may be made beside it."""

    thread: int
    call: str
    shares: bool


# What a program uses of a run; the rest is its parts, for the modes.
SHOWN = (
    "best_model close code evaluate extra generate history is_open model models names page predict reset_patience "
    "restore result run_dir save set_weights step stop train trainer"
).split()


class Run(BaseRun):
    """A run: the result of `crankshaft.run`, or an open run of `open_run`.

    Attributes:
      run_dir: the folder of its files; None without one.
      is_open: whether it is open.
    """

    run_dir: str | None
    is_open: bool

    def __dir__(self) -> list[str]:
        return [*object.__dir__(object()), *SHOWN]

    def mark_open(
        self,
        outcome_writer: RunOutcomeWriter,
        isolation: Isolation,
        stack: contextlib.ExitStack,
        page: Callable[[str | None], Any],
    ) -> None:
        """Opens the run, the last step of assembling it.

        Args:
          isolation: the run's values of process-wide state, which the program has others of.
          stack: the contexts that closing the run exits.
          page: makes the page of the run in a folder.
        """
        self.run_dir = self.config.configured_run_dir
        self.is_open = True
        self._outcome_writer, self._isolation, self._stack = outcome_writer, isolation, stack
        self._page = page
        self._standby = Standby(self._end_by_signal)
        self._compared: weakref.WeakSet[Stream] = weakref.WeakSet()  # passed streams, by the workers
        self._has_agreed_to_end = False  # by a signal, with the other workers
        self._predictors: dict[str | None, Any] = {}
        self._predictions = itertools.count()  # of calls, each of which samples others
        self._copy: Any = None  # copy of the models, if the run's own are not handed out
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._in_progress: list[_InProgress] = []
        self._turns = threading.RLock()  # held while a call begins or ends, not while it reads data or computes
        self._kept = self  # for what the run itself keeps: see `handle`

    def __repr__(self) -> str:
        result = self.result
        metrics = result.get("eval") or result.get("train") or {}
        shown = "".join(f", {name}={value:.6g}" for name, value in sorted(metrics.items()) if value is not None)
        return f"Run(step={self.step}{shown}, run_dir={self.run_dir!r})"

    def __enter__(self) -> Run:
        return self

    @explanations.explained
    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        self._end(error)

    @explanations.explained
    def close(self) -> None:
        """Ends the run: saves it, writes its result, and frees what it holds. A run that is closed stays so.

        Raises:
          RunError: the run can't be saved: its weights are not finite, or a call was interrupted in the middle.
        """
        self._end(None)

    @explanations.explained
    def train(self, steps: int | None = None, epochs: float | None = None, data: Any = None) -> Means:
        """Trains the given number of steps or epochs, from where the run is.

        With neither, it trains to the end of a run that has one. It ends earlier where the run does, or a hook stops
        it: `stop` then has the reason, and further calls raise. On a GPU it returns before all is done.

        Args:
          steps: number of updates.
          epochs: passes over the data; a part of one is rounded up to whole steps.
          data: what to train on instead of the run's own data: of its form, and of any length, which costs no
            compilation. Arrays and sources are shuffled (not with `shuffle_buffer=0`), streams read in their order:
            with `steps`, the same dataset continues where the last call left it, and is read no further. Batches are of
            `global_batch_size` examples, or of all if they are fewer. These steps count as the run's, and its own data
            continues with the batch of the step that they lead to.

        Returns:
          The means of the metrics over these steps, by name; read where they are looked at.

        Raises:
          UsageError: the run is closed or has stopped, the length is not one, or data is of another form.
          RunError: training failed. After an error outside the compiled steps, in a hook or in the data, the run can
            continue from its step; after one within them, `restore` takes it back to a checkpoint.
        """
        with self._call("train", steps=steps, epochs=epochs, data=data) as split:
            return training.train(self, steps, epochs, split)

    @explanations.explained
    def save(self, extra: dict[str, Any] | None = None) -> None:
        """Writes a checkpoint of the current state, and waits until it is on the disk.

        Args:
          extra: sets `extra`, which each checkpoint from now on has with it.

        Raises:
          UsageError: the run is closed or has no run_dir, or `extra` is not a dictionary of plain JSON.
        """
        with self._call("save"):
            if not self.checkpoints:
                raise UsageError("save(): the run has no folder to write to; give open_run a run_dir")
            if extra is not None:
                self.extra = extra
            with self.timed_as("checkpoints"):
                saving.save(self.checkpoints, self.loop.status, self.hooks, again=True)
                self.checkpoints.wait()

    @explanations.explained
    def restore(self, which: str | int) -> None:
        """Takes the run back to a checkpoint: weights, optimizer, step, position in the data, hooks and `extra`.

        Keras callbacks get their state of that step, with `stop_training`, best weights and the history; lines that a
        CSVLogger has written since are cut. Those without a state are named, once.

        Args:
          which: "best", by --monitor, "latest", or the step of a checkpoint that is kept.

        Raises:
          UsageError: the run is closed, or the checkpoint does not exist.
        """
        with self._call("restore", which=which):
            if not self.checkpoints:
                raise UsageError(f"restore({which!r}): the run has no checkpoints; give open_run a run_dir")
            training.restore(self, which)

    @explanations.explained
    def reset_patience(self) -> None:
        """Makes early stopping and `reduce_lr` begin again: the next evaluation is the first that they see.

        A run that early stopping has stopped continues, on other data for example: `train` trains again.

        Raises:
          UsageError: the run is closed.
        """
        with self._call("reset_patience"):
            if reset_patience(self.hooks):
                self.loop.resume_work()

    @property
    def extra(self) -> dict[str, Any]:
        """The program's own values in each checkpoint, plain JSON by name; a resumed run restores them."""
        return self.state.extra

    @extra.setter
    def extra(self, values: dict[str, Any]) -> None:
        check_extra(values)
        self.state.extra = values

    @property
    def result(self) -> dict[str, Any]:
        """As `result.json` has it, plain JSON: step, train, eval, steps_per_sec, stop and more; {} of an open run."""
        return self._outcome_writer.result

    @property
    def code(self) -> int:
        """The exit code of a process that has done nothing but the run."""
        return self._outcome_writer.code

    @property
    def history(self) -> HistoryEntries:
        """The entries so far, one for each window of training metrics or evaluation."""
        return self.history_hook.entries if self.config.trains else HistoryEntries()

    def page(self) -> Any:
        """Returns the page of `crankshaft monitor` as it is now, which a notebook shows below its cell.

        Raises:
          UsageError: the run has no run_dir, whose log the page shows.
        """
        return self._page(self.config.run_dir)

    @property
    def models(self) -> dict[str, tf.keras.Model]:
        """The Keras models among the trainer's attributes, by name, with their current weights.

        If weights are sharded over a mesh, copies on this process's device.
        """
        return weights.keras_models(weights.unsharded_trainer(self))

    @property
    def model(self) -> Any:
        """The trained Keras model, with the last weights; with their moving average, if there is one.

        After training on one device it is the model that is trained; on replicas or servers, and with an average, one
        copy on this process's device, which has the run's weights after each call. Weights that you set are the run's.

        It computes `Trainer.forward`; `models` has the Keras models alone.
        """
        if self._copy is not None:
            self._copy.write_back()
            self._copy.refresh()
        from ...runner.modes import predicting, saved_run

        return saved_run.model_of_trainer(self._evaluated_trainer(), predicting.view_run(self), self._isolation)

    @explanations.explained
    def set_weights(self, values: Sequence[Any] | Mapping[str, Any], name: str | None = None) -> None:
        """Sets weights, on all replicas, shards and servers, and their moving averages; the optimizer keeps its state.

        The next checkpoint has them. Each process of a run makes the call, with the same values. An `Averaged`
        model keeps its own weights, which are set by its name.

        Args:
          values: a list of arrays in the order of `run.model.get_weights()`; or some weights by name: a variable's
            `path` (`run.model.weights[0].path`), or an embedding table's name, whose array is [rows, width].
          name: name of the model, among `models`, that a list of values is for.

        Raises:
          UsageError: the run is closed, or an array's name, shape or type is not the model's; nothing is changed.

        Example:
          >>> run.set_weights([0.5 * array for array in run.model.get_weights()])  # doctest: +SKIP
        """
        with self._call("set_weights", name=name):
            weights.set_weights(self, values, name)

    def best_model(self) -> Any:
        """Returns a Keras model, as `model`, with the weights of the best evaluation by --monitor.

        Raises:
          UsageError: none was kept.
        """
        if not self.best or self.best.latest() is None:
            raise UsageError("no best checkpoint was kept; give run_dir=..., and data with a split to evaluate on")
        from ...runner.modes import predicting, saved_run

        trainer = saved_run.SavedRun(self.config.files.path).trainer("best", lambda _: weights.fresh_trainer(self))
        return saved_run.model_of_trainer(trainer, predicting.view_run(self), self._isolation)

    @explanations.explained
    def predict(
        self, data: Any = None, name: str | None = None, *, split: str | None = None, columns: bool = False
    ) -> Any:
        """Computes the outputs of `Trainer.forward`, as NumPy arrays in the examples' order, 16-bit ones as float32.

        Examples are computed `eval_batch_size` at a time, across all replicas, with the weights that evaluations use;
        each process of a run makes the call, and has all outputs. What samples in predictions too, such as dropout
        with `training=True`, draws other samples at each call.

        Args:
          data: features in the form of the run's: an array, a dictionary or a tuple of arrays, whose first axis is
            examples; what was text before it was looked up for training may be text or ids. Or a `Source`, a `Stream`,
            a `tf.data.Dataset` or a `PyDataset`, with labels or without; or the name of an input, such as "digits".
            None is the run's own data.
          name: name of a model among `models`, which then takes the features instead of `Trainer.forward`.
          split: "eval" ("eval/NAME" of several evaluation sets) or "train", of the run's own data or a named input's;
            None is "eval", if there is one.
          columns: whether to return arrays by name, as `--mode=predict` writes them: "class", "class_name",
            "probability" and so on, and "id" where the data names its examples.

        Raises:
          UsageError: the model does not take such features, or the split or model does not exist.

        Example:
          >>> run.predict(split="eval").argmax(-1)  # doctest: +SKIP
        """
        from ...runner.modes import predicting, prediction_files

        predictor: Any = None

        def checked(data):
            nonlocal predictor
            if (predictor := self._predictors.get(name)) is None or predictor.is_copy:
                predictor = self._predictors[name] = predicting.Predictor(self._kept, name)
            return predictor.checked(data, split)

        with self._call("predict", False, data, checked, True, name=name, split=split) as examples:
            is_own = external.is_own(self, examples, data is not None and not isinstance(data, str))
            outputs = predictor(examples, next(self._predictions), lambda: self._standby.name, is_own)
            if not columns:
                return outputs
            return prediction_files.prediction_columns(predicting.view_run(self), examples, outputs, name)

    @explanations.explained
    def generate(
        self,
        prompt: str | Sequence[int] = "",
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 40,
        seed: int | None = None,
    ) -> str | list[int]:
        """Generates text after a prompt, up to a document's end, with the weights that evaluations use.

        Args:
          prompt: text, of a run on text, which the model reads as a document's beginning; then text is returned. Or
            tokens, one or more, which are used unchanged; the result is then tokens too.
          tokens: largest number of tokens to generate.
          temperature: 0 always takes the likeliest.
          top_k: number of the likeliest tokens to sample from; 0 is all.
          seed: seed of the samples; None is the run's.

        Raises:
          UsageError: the model predicts no next token (`engine.generation.Generates`), the prompt is empty, or an
            argument is out of range.
        """
        from ...runner.modes import generate

        sampled = {} if seed is None else {"seed": seed}
        sampling = {"tokens": tokens, "temperature": temperature, "top_k": top_k, **sampled}
        with self._call("generate", while_open=False, shares=True, prompt=prompt, **sampling):
            return generate.generate_after(self, prompt, **sampling)

    @explanations.explained
    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Computes the metrics' means, with the weights that evaluations use, each example once.

        Args:
          data: a split of the form of the run's, of any length: arrays, a source or a stream; None is the run's own
            evaluation data.

        Raises:
          UsageError: data is of another form, or the run has none to evaluate on.
        """
        with self._call("evaluate", while_open=False, data=data, shares=data is not None) as split:
            return evaluate.evaluate(self, split, lambda: self._standby.name)

    def execute_mode(self, mode: Callable[[Run], Outcome]) -> None:
        """Executes a mode, a function of the run; writes its result, and closes the run."""
        with self._hand_over_after(), self._closing(), self._environment():
            self._end_with(mode(self))

    def begin_loop(self) -> None:
        """Restores a checkpoint of an open run, and begins its hooks if it trains; closes it after an error."""
        try:
            with self._environment(), self._hand_over_after():
                if self.config.trains:
                    training.restore_newest(self, to_end=False)
                    self.loop.begin()
                else:
                    training.restore(self, self.config.eval_checkpoint)
        except Exception as error:
            self._release(error)
            raise
        if self.config.trains:
            self._stack.enter_context(self._standby)
        exits.LEFT_OPEN[self.end_left_open] = self.run_dir if self.config.trains else None
        self._stack.callback(exits.LEFT_OPEN.pop, self.end_left_open, None)
        self._stack.callback(atexit.unregister, atexit.register(self.end_left_open))

    def handle(self) -> Run:
        """Makes the object that the program holds: once nothing holds it, the run is saved and closed."""
        # Hooks, the result's writer and what is done at exit hold the run itself, which is never collected while it is
        # open. The program's object shares the attributes, and none of them holds it.
        handle = object.__new__(Run)
        handle.__dict__ = self.__dict__
        weakref.finalize(handle, self._end_dropped).atexit = False  # `begin_loop` registers that end
        return handle

    def _end_dropped(self) -> None:
        # Python collects at any place. Within another run's call, or a function that TensorFlow traces, locks are held
        # and nothing can be computed: then it is done when the next run starts, or the program ends.
        if not any(explanations.is_internal(caller.frame) for caller in inspect.stack(context=0)[1:]):
            self.end_left_open()
        elif self.is_open:
            exits.LEFT_OPEN[self.end_left_open] = exits.DROPPED

    def end_left_open(self, asks_others: bool = False) -> None:
        """Saves and closes the run, which its program has not closed; what keeps it from being saved is logged.

        Args:
          asks_others: whether other processes do so too. At the program's end, and where an object is collected, they
            may be in another call, and wait for this one: then a run of several is not saved.
        """
        if not self.is_open or self._standby.is_within_call or self._process != os.getpid():
            return
        folder = f"the run of {self.run_dir}" if self.run_dir else "a run without run_dir"
        is_saved = asks_others or self.strategy.num_hosts == 1
        end = "saved and closed" if is_saved else "not saved; let each worker close it, as `with` does"
        if self.config.trains:
            logging.warning("%s was left open at step %d: it is %s", folder, self.step, end)
        if is_saved:
            self._end(None, is_left=True)
        else:
            self._release(None)

    @contextlib.contextmanager
    def _call(
        self, method: str, while_open: bool = True, data=None, checked=None, shares: bool = False, **arguments
    ) -> Iterator[Any]:
        """Makes one call, the same in each process of the run; yields the checked data passed to it.

        Within, the run's own values of shared state are set, and signals wait or end training at a step. An error after
        which the run can't continue closes it, such as one in a run of several processes.

        Args:
          while_open: whether a run that is closed can't do it.
          data: see `train`.
          checked: checks the data and makes a split of it; None for data of the run's form.
          shares: whether it may be made beside calls of other threads: it leaves the run as it is.
          **arguments: other arguments of the call, to compare between processes.
        """
        passed = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if value is not None)
        call = f"{method}({passed})"
        if while_open and not self.is_open:
            raise UsageError(f"{call}: the run is closed; open it again, with the same run_dir to continue it")
        if not self.config.trains and method in ("train", "save", "reset_patience"):
            raise UsageError(f"{call}: mode={self.config.mode} only reads the run; use open_run without it to train")
        with self._standby.calling(), self._turn(call, shares, method == "close"):
            try:
                with self._environment(uses_random=method == "train"):
                    split = None
                    if checked or data is not None:
                        split = checked(data) if checked else external.checked(self, data, method == "train")
                    with self._turns:
                        if self._copy is not None and not self._changes_elsewhere:
                            self._copy.write_back()
                    if method != "close" and (ended_by := self._agree(call, split, data)):
                        raise self._ended(call, ended_by)  # all know it: the one with the signal is past this
                    signals = self._ended_by_signals() if method == "train" else contextlib.nullcontext()
                    with self._hand_over_after(), signals:
                        yield split
            except Interrupted as request:  # in all processes; the signal may be known to one only
                ended_by = next(filter(None, self.strategy.exchange(request.args[0] or "")))
                raise self._ended(call, ended_by) from None
            except Exception as error:
                # Its kinds, of data and files, may be one process's alone.
                if self.is_open and not (self._is_alone or type(error) is UsageError):
                    self._release(error)
                raise

    @contextlib.contextmanager
    def _turn(self, call: str, shares: bool, closes: bool) -> Iterator[None]:
        """Notes a call in progress. Raises `UsageError` where one of another thread is, and both can't be."""
        thread = threading.get_ident()
        # With averages an evaluation sets the weights for a while; other strategies' calls exchange values in order.
        shares &= self._is_alone and not (self.config.ema_decay or self.strategy.mesh.is_sharded)
        with self._turns:
            if thread != self._thread and self.strategy.num_hosts > 1:
                raise UsageError(
                    f"{call}: it is made in another thread than the one that opened the run, whose processes make "
                    "their calls in one order; make all in that thread"
                )
            if not closes and (ended_by := self._standby.name) and thread not in {at for at, *_ in self._in_progress}:
                raise self._ended(call, ended_by)  # once the calls in progress are done
            for other in self._in_progress:
                if other.thread != thread and not (other.shares or shares):
                    raise UsageError(
                        f"{call}: another thread is in {other.call} of this run, and one thread at a time can do so; "
                        "make the calls one after the other, or in one thread"
                    )
            self._in_progress.append(mine := _InProgress(thread, call, shares))
        try:
            yield
        finally:
            with self._turns:
                self._in_progress.remove(mine)

    @property
    def _changes_elsewhere(self) -> bool:
        """Whether a call in another thread may change the run now."""
        return any(not other.shares and other.thread != threading.get_ident() for other in self._in_progress)

    def _ended(self, call: str, ended_by: str) -> UsageError:
        """Notes the signal by which all processes have agreed to end, and makes the error of a call that it keeps."""
        self._has_agreed_to_end = True
        self._standby.note(ended_by)
        return UsageError(f"{call}: the run ends, since a process got {ended_by}")

    @contextlib.contextmanager
    def _environment(self, uses_random: bool = True) -> Iterator[None]:
        """Enters the state in which the run finds its process; `uses_random`: with its own random generators.

        A run that is closed is open again within, to compute.
        """
        with contextlib.ExitStack() as stack:
            if not self.is_open:
                stack.enter_context(self.strategy.watch())
                stack.enter_context(closing_feeds(self.strategy))
            stack.enter_context(self._isolation.entered(uses_random))
            yield

    @contextlib.contextmanager
    def _hand_over_after(self) -> Iterator[None]:
        """Gives the models outside of the run its weights after this context, also if that fails."""
        was_open = self.is_open
        try:
            yield
        except BaseException:
            try:
                if self._is_alone:  # else the others may not be there to answer
                    self._hand_over(was_open)
            except Exception as error:  # the one within the context is raised instead
                logging.warning("the weights trained so far are not handed over: %s", error)
            raise
        self._hand_over(was_open)

    @property
    def _is_alone(self) -> bool:
        """Whether one process has all of the run."""
        return self.strategy.num_hosts == 1 and not self.config.coordinates

    def _hand_over(self, was_open: bool) -> None:
        """Gives the copy of the models the run's present weights; while it is open, also the model passed to it.

        The end of a call of another thread that may change these does so, if one is in progress.
        """
        with self._turns:
            if self._changes_elsewhere:
                return
            if self._copy is not None:
                self._copy.refresh()
            trainer: Any = self.trainer
            if was_open and self.config.trains and trainer.is_built:
                passed = trainer.make()
                # One that is trained itself gets an average only once that is done.
                trains_passed = trainer.model is passed and (self.is_open or not self.config.ema_decay)
                trained = passed if trains_passed else self._evaluated_trainer().model
                trainer.hand_over(trained, self.inputs.updates_before + self.step)

    def _evaluated_trainer(self) -> Trainer:
        """Returns a trainer with the weights that evaluations use: the run's own, or the copy."""
        if weights.has_whole_trainer(self):
            return self.trainer
        if self._copy is None:
            self._copy = weights.TrainerCopy(self._kept)
        return self._copy.trainer

    @contextlib.contextmanager
    def _ended_by_signals(self) -> Iterator[None]:
        """Makes a signal end training at a step; its usual effect follows at the end of the call."""
        try:
            with self.signals:
                yield
        finally:
            self._standby.note(training.ending_signal(self))

    def _agree(self, call: str, split=None, data=None) -> str | None:
        """Compares what processes that train together do next: a call, or end by a signal, whose name then is `call`.

        Args:
          split: what the call computes on, if any.
          data: what is passed to the call, if anything, of which `split` was made.

        Returns:
          The name of the signal that ends all instead, if one of them got one.

        Raises:
          UsageError: one of them makes another call, or on other data.
          OutOfSyncError: the program has set a variable to other values in one of them.
        """
        if self.strategy.num_hosts > 1:
            from ...parts.workers import agreement

            call = call if split is None else f"{call} on {external.describe(split)}"
            ended_by = agreement.compare_calls(call, self.strategy)
            if not ended_by and not isinstance(data, (str, type(None))) and split not in self._compared:
                if not external.is_own(self, split):
                    agreement.check_examples({"given": split}, self.strategy, "AUTO", are_passed=True)
                if isinstance(split, Stream):  # which is read again for it, so it is done once
                    self._compared.add(split)
            if self.sync_check:
                self.sync_check.act(self.loop.status)
            return ended_by
        return None

    def _end_with(self, outcome: Outcome) -> None:
        """Writes the result, and then prints the outcome's lines and report."""
        self._outcome_writer.set(outcome.result, outcome.code)
        for line in outcome.lines:
            self.log(line)
        if outcome.report:
            print(outcome.report, flush=True)

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """Closes the run after the body, which may have failed."""
        try:
            yield
        except BaseException as error:
            self._release(error)
            raise
        self._release(None)

    def _release(self, error: BaseException | None) -> None:
        """Frees the run's resources; after an error, another one that explains it may be raised."""
        self.is_open = False
        if self.config.coordinates and not self.code and error is None:
            cast(Any, self.strategy).dismiss()
        self._stack.__exit__(*((type(error), error, error.__traceback__) if error else (None, None, None)))

    def _end_by_signal(self, name: str) -> None:
        """Handles a signal: ends the run, and then lets the signal have its usual effect."""
        if self.is_open and (name != "SIGINT" or self.strategy.num_hosts > 1):
            status = self.loop.status
            status.agreed_stop = status.agreed_stop or Stop(name)
            status.stop = str(status.agreed_stop)
            self._end(None, ended_by=name)
        signal.raise_signal(EXIT_CODES[name] - 128)

    def _end(self, error: BaseException | None, ended_by: str | None = None, is_left: bool = False) -> None:
        """Saves and closes an open run; several processes save it only if none of them failed.

        After an error of the program's, or a signal (`ended_by`), or where the program does not see it (`is_left`),
        what keeps the run from being saved is logged instead of raised.
        """
        if not self.is_open:
            return
        if not self.config.trains or (error is not None and self.strategy.num_hosts > 1):
            self._release(error)
            return
        try:
            with self._call("close"), self._closing():
                agreed = None if self._has_agreed_to_end else self._agree(ended_by or "close()")
                self._standby.note(None if ended_by else agreed)
                with self.signals:
                    self.loop.end()
                self._end_with(training.outcome(self, evaluates=False))
                self._standby.note(None if ended_by else training.ending_signal(self))
        except Exception as problem:
            if error is None and not ended_by and not is_left:
                raise
            logging.error("the run is closed, and not saved: %s", explanations.explain(problem, has_debug=False)[1])
