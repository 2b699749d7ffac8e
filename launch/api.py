"""Runs in Python: `crankshaft.run` and `open_run`, in a script, a search or a notebook. Host code.

A run's keywords are the flags, checked by the same rules. Nothing of one run reaches the next, nor the program between
the calls of one: flags get their values back, and so does whatever else a run sets for its process (`isolation`).
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags, logging
from absl.testing import flagsaver

from . import explanations, train
from .benchmark.result import check_baseline
from .command_line import checks, given, own_files, rules
from .command_line import config as configs
from .command_line import flags as our_flags
from .errors import EXIT_HUNG_UP, EXIT_TERMINATED, RunError, UsageError
from .held import Held, perform
from .host import remote as remotes
from .host.signals import Standby
from .run.history import Rows

if TYPE_CHECKING:
    import tensorflow as tf

    from ..engine.trainer import Trainer
    from .run.history import Means
    from .run.names import Names

_NAME = "crankshaft.run"  # in place of a program's path


def run(
    trainer_class: type | None = None,
    *,
    data: Callable | Sequence | None = None,
    hooks: Sequence = (),
    may_change: Sequence[str] = (),
    **keywords: Any,
) -> Run:
    """Runs a model as its keywords say: `run(PlaneTrainer, data=data, train_steps=100, learning_rate=0.1)`.

    Ctrl-C stops the run, saves it, and returns; a second one raises KeyboardInterrupt. SIGTERM and SIGHUP stop and
    save, and then do what they would have done without a run. Threads are left as they are: only a process that belongs
    to the run (`main`) gives each core of a CPU a part of a batch.

    Args:
      trainer_class: as `crankshaft.main` takes it.
      data: as `crankshaft.main` takes it.
      hooks: as `crankshaft.main` takes them.
      may_change: as `crankshaft.main` takes it.
      **keywords: the flags by name, `crankshaft train --help` lists them; lists for those that may be repeated,
        dictionaries for `model_arg` and its like. None is a flag that is not given. The script's own absl flags may be
        among them; those not among them keep their values.

    Raises:
      UsageError: a mistake in what was asked (a ValueError); the message is what the command would print,
        with keywords instead of flags.
      RunError: the run failed (a RuntimeError), likewise; its cause is the exception that ended it.

    Example:
      >>> run(PlaneTrainer, data=data, train_steps=100, learning_rate=0.1).result["eval"]  # doctest: +SKIP
    """
    with explanations.as_lines():
        return run_within(trainer_class, data=data, hooks=hooks, may_change=may_change, **keywords)


def run_within(
    trainer_class=None,
    *,
    data=None,
    hooks=(),
    may_change=(),
    once_failed: Callable[[Run], None] | None = None,
    **keywords,
) -> Run:
    """Runs a model as `run` does; its caller turns exceptions into lines (`explanations.as_lines`).

    `once_failed` is called with a run that an error ends.
    """
    failed = (lambda held: once_failed(_run_of(held))) if once_failed else None
    config, own = _asked(trainer_class, data, may_change, keywords)
    with _script_flags(own):
        held = perform(config, data, hooks, failed)
    if held.code in (EXIT_HUNG_UP, EXIT_TERMINATED):
        signal.raise_signal(held.code - 128)
    return _run_of(held)


def open_run(
    trainer_class: type | None = None,
    *,
    data: Callable | Sequence | None = None,
    hooks: Sequence = (),
    may_change: Sequence[str] = (),
    **keywords: Any,
) -> Run:
    """Opens a run for a program that has its own loop: it is assembled once, and trains as often as asked.

    With a run_dir it resumes from the latest checkpoint, if there is one. It has no end unless `train_steps` or
    `train_epochs` sets one. When the context ends, also by your own exception or by Ctrl-C, the run is saved and
    closed. A signal ends a call of `train` at a step, and then does what it would have done without a run;
    SIGTERM and SIGHUP save and close the run before, between two calls too.

    Args:
      trainer_class: as `crankshaft.main` takes it.
      data: as `crankshaft.main` takes it: what the run trains on, and the form of all that it is given later.
      hooks: as `crankshaft.main` takes them.
      may_change: as `crankshaft.main` takes it.
      **keywords: as `crankshaft.run` takes them.

    Raises:
      UsageError: a mistake in what was asked.
      RunError: the run could not be put together.

    Example:
      >>> with open_run(PlaneTrainer, data=data, learning_rate=0.1) as run:  # doctest: +SKIP
      ...     for _ in range(10):
      ...         print(run.step, run.train(steps=10)["loss"])
    """
    with explanations.as_lines():
        config, own = _asked(trainer_class, data, may_change, keywords, may_be_endless=True)
        if not config.trains:
            raise UsageError(f"open_run(mode={config.mode!r}): an open run trains; use crankshaft.run for this mode")
        held = Held(config)
        with _script_flags(own):
            held.open(data, hooks)
            if held.training:
                with held.closing_after_errors(any_error=True), held.at_work():
                    held.training.restore_newest()
                    held.training.loop.begin()
    run = _run_of(held, own)
    held.keep(run._standby)
    return run


def _asked(trainer_class, data, may_change: Sequence[str], keywords: dict[str, Any], **how) -> tuple[Any, dict]:
    """Returns the configuration that keywords ask for, checked, and the script's own flags that they set, by name.

    They are parsed into a copy of the flags, so that runs in several threads share none. Raises `UsageError`.
    """
    own_files.check_trainer(trainer_class)
    parsed = copy.deepcopy(flags.FLAGS)
    for name in our_flags.ABOUT:
        parsed[name].unparse()
    own = train.read_flags([_NAME, *given.words(keywords)], parsed)
    config = configs.from_flags(
        *(parsed, trainer_class, data is not None, os.environ, own - set(may_change)),
        owns_process=False,
        remote=remotes.of(parsed["run_dir"].value),
        **how,
    )
    checks.check(config)
    check_baseline(config)
    return config, {name: parsed[name].value for name in own if parsed[name].value != flags.FLAGS[name].value}


def _script_flags(values: dict[str, Any]) -> contextlib.AbstractContextManager:
    """Sets a script's own flags where it looks for them, and restores them."""
    flags.FLAGS.mark_as_parsed()
    return flagsaver.flagsaver(**values) if values else contextlib.nullcontext()


def _run_of(held: Held, own_flags: dict[str, Any] | None = None) -> Run:
    if held.session is None:  # a task that served a coordinator, until that one ended
        raise SystemExit(held.code)
    return Run(held, own_flags)


class Run:
    """A run: the result of `crankshaft.run`, or an open run of `open_run`.

    Attributes:
      run_dir: where its files are; None if there are none.
    """

    def __init__(self, held: Held, own_flags: dict[str, Any] | None = None):
        self.run_dir: str | None = held.config.given_run_dir
        self._held = held
        self._session = held.session
        self._own_flags = own_flags or {}
        self._predictors: dict[str | None, Any] = {}
        self._standby = Standby(self._end_by_signal)
        self._has_agreed_to_end = False  # by a signal, with the other workers
        self._copy: Any = None  # of the models, if it is not those of the run that are handed out

    def __repr__(self) -> str:
        result = self.result
        metrics = result.get("eval") or result.get("train") or {}
        shown = "".join(f", {name}={value:.6g}" for name, value in sorted(metrics.items()) if value is not None)
        return f"Run(step={self.step}{shown}, run_dir={self.run_dir!r})"

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind, error, _) -> None:
        self._end(error)

    def close(self) -> None:
        """Ends the run: saves it, writes its result, and frees what it holds. A run that is closed stays so.

        Raises:
          RunError: the run can't be saved: its weights are not finite, or a call was interrupted in the middle.
        """
        self._end(None)

    def train(self, steps: int | None = None, epochs: float | None = None, data=None) -> Means:
        """Trains the given number of steps or epochs, from where the run is.

        With neither, it trains to the end of a run that has one. It ends earlier where the run does, or a hook stops
        it: `stop` then says why, and further calls are a mistake. On a GPU it returns before all is done.

        Args:
          steps: updates.
          epochs: passes over the data; a part of one is rounded up to whole steps.
          data: what to train on in place of the run's own data: of its form, and of any length, which costs no
            compilation. Arrays and sources are shuffled (not with `shuffle_buffer=0`), streams read in their order:
            with `steps`, the same dataset goes on where the last call left it, and is read no further. Batches are of
            `global_batch_size` examples, or of all there are. These steps count as the run's, and its own data goes on
            with the batch of the step that they lead to.

        Returns:
          The means of the metrics over these steps, by name; read where they are looked at.

        Raises:
          UsageError: the run is closed or has stopped, the length is not one, or data is of another form.
          RunError: training failed. After an error outside the compiled steps, in a hook or in the data, the run can
            go on from its step; after one within them, `restore` takes it back to a checkpoint.
        """
        with self._calling("train", steps=steps, epochs=epochs, data=data) as split:
            try:
                means = self._training.train(steps, epochs, split)
            finally:
                self._standby.note(self._training.take_signal())
        return means

    def save(self, extra: dict[str, Any] | None = None) -> None:
        """Writes a checkpoint of the run as it is, and waits until it is on the disk.

        Args:
          extra: sets `extra`, which each checkpoint from now on has with it.

        Raises:
          UsageError: the run is closed or has no run_dir, or `extra` is not a dictionary of plain JSON.
        """
        with self._calling("save"):
            if not self._session.checkpoints:
                raise UsageError("save(): the run has no folder to write to; give open_run a run_dir")
            if extra is not None:
                self.extra = extra
            self._training.save()

    def restore(self, which: str | int) -> None:
        """Takes the run back to a checkpoint: weights, optimizer, step, place in the data, hooks and `extra`.

        Args:
          which: "best", by --monitor, "latest", or the step of a checkpoint that is kept.

        Raises:
          UsageError: the run is closed, or there is no such checkpoint.
        """
        with self._calling("restore", which=which):
            if not self._session.checkpoints:
                raise UsageError(f"restore({which!r}): the run has no checkpoints; give open_run a run_dir")
            self._training.restore(which)

    def reset_patience(self) -> None:
        """Makes early stopping and `reduce_lr` begin again: the next evaluation is the first that they see.

        A run that early stopping has stopped goes on, on other data for example: `train` trains again.

        Raises:
          UsageError: the run is closed.
        """
        with self._calling("reset_patience"):
            self._training.reset_patience()

    @property
    def step(self) -> int:
        """Updates done."""
        return self._session.state.step

    @property
    def stop(self) -> str | None:
        """Why the run trains no further: its end, or what a hook said; None while it does."""
        return self._held.training.stop if self._held.training else None

    @property
    def extra(self) -> dict[str, Any]:
        """What each checkpoint has with it of the program's own, plain JSON by name; of a resumed run what it had."""
        return self._training.extra.values

    @extra.setter
    def extra(self, values: dict[str, Any]) -> None:
        before, self._training.extra.values = self._training.extra.values, values
        try:
            self._training.extra.check()
        except UsageError:
            self._training.extra.values = before
            raise

    @property
    def result(self) -> dict[str, Any]:
        """As `result.json` has it, plain JSON: step, train, eval, steps_per_sec, stop and more; {} of an open run."""
        return self._held.result

    @property
    def history(self) -> Rows:
        """The rows so far, one for each window of training metrics or evaluation."""
        return self._held.training.history.rows if self._held.training else Rows()

    @property
    def trainer(self) -> Trainer:
        """The trainer, on which the run works."""
        return self._session.trainer

    @property
    def models(self) -> dict[str, tf.keras.Model]:
        """The Keras models that the trainer holds, by the names of its attributes, as they are trained."""
        return self._weights.models_of(self.trainer)

    @property
    def model(self) -> tf.keras.Model:
        """The trained Keras model, with the last weights; with their moving average, if there is one.

        After training on one device it is the model that is trained; on replicas or servers, and with an average, one
        copy on this process's device, which has the run's weights after each call. Weights that you set are the run's.

        It computes `Trainer.forward`; `models` has the Keras models alone.
        """
        weights, session = self._weights, self._session
        if weights.trains_what_it_hands_out(session):
            return self._predicting(weights.trained(session))
        if self._copy is None:
            self._copy = weights.HandedOut(session)
        else:
            self._copy.give_back()
            self._copy.refresh()
        return self._predicting(self._copy.trainer)

    def best_model(self) -> tf.keras.Model:
        """Returns a Keras model, as `model`, with the weights of the best evaluation by --monitor.

        Raises:
          UsageError: none was kept.
        """
        trainer = self._weights.best(self._session)
        if trainer is None:
            raise UsageError("no best checkpoint was kept; give run_dir=..., and data with a split to evaluate on")
        return self._predicting(trainer)

    @property
    def names(self) -> Names:
        """What the model's numbers stand for: `classes`, by label number, and `ids(features)`, which looks up text."""
        return self._session.names

    def predict(
        self, data: Any = None, name: str | None = None, *, split: str | None = None, columns: bool = False
    ) -> Any:
        """Computes the outputs of `Trainer.forward`, as NumPy arrays in the examples' order, 16-bit ones as float32.

        Examples are computed `eval_batch_size` at a time, over all replicas, with the weights that evaluations use;
        each process of a run makes the call, and has all outputs.

        Args:
          data: features in the form of the run's: an array, a dictionary or a tuple of arrays, whose first axis is
            examples; what was text before it was looked up for training may be text or ids. Or a `Source`, a `Stream`,
            a `tf.data.Dataset` or a `PyDataset`, with labels or without; or the name of an input, such as "digits".
            None is the run's own data.
          name: of a model among `models`, which then takes the features in place of `Trainer.forward`.
          split: "eval" or "train", of the run's own data or a named input's; None is that of evaluations, if any.
          columns: whether to return arrays by name, as `--mode=predict` writes them: "class", "class_name",
            "probability" and so on, and "id" where the data names its examples.

        Raises:
          UsageError: the model does not take such features, or there is no such split or model.

        Example:
          >>> run.predict(split="eval").argmax(-1)  # doctest: +SKIP
        """
        from .run import prediction_files, predictions

        def checked(data):
            if name not in self._predictors or self._predictors[name].is_cut:
                self._predictors[name] = predictions.Predictor(self._session, name)
            return self._predictors[name].checked(data, split)

        with self._calling("predict", False, data, checked, name=name, split=split) as examples:
            outputs = self._predictors[name](examples)
            if not columns:
                return outputs
            logits_of = None if name else self._weights.logits_of(self.trainer)
            return prediction_files.columns(self._session, examples, outputs, logits_of)

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
            tokens, one or more, read as they are; then tokens are.
          tokens: how many, at most.
          temperature: 0 always takes the likeliest.
          top_k: of how many of the likeliest to draw; 0 is all.
          seed: decides what is drawn; None is the run's.

        Raises:
          UsageError: the model predicts no next token (`engine.generation.Generates`), the prompt is empty, or an
            argument is out of range.
        """
        from .run import generation

        drawn = {} if seed is None else {"seed": seed}
        how = {"tokens": tokens, "temperature": temperature, "top_k": top_k, **drawn}
        with self._calling("generate", while_open=False, prompt=prompt, **how):
            return generation.text_after(self._session, prompt, **how)

    def evaluate(self, data=None) -> dict[str, float]:
        """Computes the metrics' means, with the weights that evaluations use, each example once.

        Args:
          data: a split of the form of the run's, of any length: arrays, a source or a stream; None is the run's own
            evaluation data.

        Raises:
          UsageError: data is of another form, or the run has none to evaluate on.
        """
        from .run import predictions

        with self._calling("evaluate", while_open=False, data=data) as split:
            return predictions.evaluate(self._session, split)

    def _predicting(self, trainer: Trainer) -> tf.keras.Model:
        from .run import saved_run

        return saved_run.of_run(self._session, trainer)

    @property
    def _weights(self):
        from .run import weights

        return weights

    @property
    def _training(self):
        if not self._held.training:
            raise UsageError(f"a run of mode={self._held.config.mode} does not train; use crankshaft.open_run")
        return self._held.training

    @contextlib.contextmanager
    def _calling(self, method: str, while_open: bool = True, data=None, checked=None, **arguments) -> Iterator[Any]:
        """Makes one call, the same in each process of the run; yields data that is given to it, checked.

        Args:
          method: its name.
          while_open: whether a run that is closed can't do it.
          data: see `train`.
          checked: checks data and makes a split of it; None is for data of the run's form, if any is given.
          **arguments: as they were given, to compare.
        """
        held = self._held
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if value is not None)
        if while_open and not held.is_open:
            raise UsageError(
                f"{method}({given}): the run is closed; open it again, on the same run_dir if it is to go on"
            )
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._standby.calling())
            stack.enter_context(explanations.as_lines())
            stack.enter_context(_script_flags(self._own_flags))
            stack.enter_context(held.closing_after_errors() if held.is_open else held.opened_again())
            stack.enter_context(held.at_work(draws=method == "train"))
            split = checked(data) if checked else None if data is None else self._checked(data)
            if self._copy is not None:
                self._copy.give_back()
            if method != "close" and (ended_by := held.agree(f"{method}({given})", split)):
                self._has_agreed_to_end = True
                self._standby.note(ended_by)
                raise UsageError(f"{method}({given}): the run ends, since a worker got {ended_by}")
            yield split
            if self._copy is not None:
                self._copy.refresh()

    def _checked(self, data):
        from .run import lent

        return lent.checked(self._session, data)

    def _end_by_signal(self, name: str) -> None:
        """Does what a signal is to do: ends the run, and then what it would have done without one."""
        if self._held.is_open and (name != "SIGINT" or self._session.strategy.num_hosts > 1):
            self._training.stop_by(name)
            self._end(None, ended_by=name)
        signal.raise_signal(signal.Signals[name])

    def _end(self, error: BaseException | None, ended_by: str | None = None) -> None:
        """Saves and closes an open run; several processes save it only where none of them failed.

        After an error of the program's, or a signal (`ended_by`), what keeps the run from being saved is logged instead
        of raised.
        """
        held = self._held
        if not held.is_open:
            return
        if error is not None and self._session.strategy.num_hosts > 1:
            with explanations.as_lines():
                held.close(type(error), error, error.__traceback__)
            return
        try:
            with self._calling("close"), held:
                agreed = None if self._has_agreed_to_end else held.agree(ended_by or "close()", None)
                self._standby.note(None if ended_by else agreed)
                with held.training.signals:
                    held.training.loop.end()
                held.set_result(*held.training.outcome(evaluates=False))
                self._standby.note(None if ended_by else held.training.take_signal())
        except (UsageError, RunError) as problem:
            if error is None and not ended_by:
                raise
            logging.error("the run is closed, and not saved: %s", problem)


def load_model(
    run_dir: str | os.PathLike, which: str | int = "latest", trainer_class: type | None = None, name: str | None = None
):
    """Loads the Keras model of a run, with a checkpoint's weights: their moving average, if the run has one.

    It computes what `Trainer.forward` computes, with the tables as they were trained. If the run's Trainer has a
    `forward` of its own, that takes `trainer_class`, and the model is one for predictions, not for training or a
    `.keras` file. While a run goes on and removes its older checkpoints, the model is of the newest that can be read.

    Its attribute `names` says what its numbers stand for, as `Run.names`, and its `predict` takes, besides what Keras's
    does, what `Run.predict` takes: text that was looked up for training, a `Source`, a dataset in batches or not, the
    name of an input, `split="eval"` or `"train"` of the run's own data, where a named input has it, and `columns`.

    Args:
      run_dir: of a run that trained.
      which: "latest", "best", or the step of a checkpoint that was kept.
      trainer_class: the run's own Trainer; needed if it has a `forward` of its own, or tables, and for a model that
        Keras can't make from its configuration (one that is subclassed, or has layers that are not registered with
        `keras.saving.register_keras_serializable`).
      name: of one of the trainer's Keras models, without `Trainer.forward`: that of the attribute, such as "generator"
        or "model".

    Raises:
      UsageError: the folder holds no such checkpoint, or the model can't be made.

    Example:
      >>> load_model("runs/digits", "best").predict(split="eval").argmax(-1)  # doctest: +SKIP
    """
    from .run import saved_run

    with explanations.as_lines():
        own_files.check_trainer(trainer_class)
        if not isinstance(path := os.fspath(run_dir) if isinstance(run_dir, os.PathLike) else run_dir, str):
            raise UsageError(f"load_model({run_dir!r:.60}): give the path of a run's folder")
        remote = remotes.of(path)
        return saved_run.SavedRun(remote.folder if remote else rules.absolute(path)).model(
            str(which), trainer_class, name
        )
