"""Runs in Python: `crankshaft.run`, in a script, a search or a notebook. Host code.

A run's keywords are the flags, checked by the same rules. Nothing of one run reaches the next: flags get their values
back, and so does whatever else a run sets for its process (`isolation`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags
from absl.testing import flagsaver

from . import explanations, train
from .benchmark.result import check_baseline
from .command_line import checks, config, given, own_files
from .command_line import flags as our_flags
from .errors import EXIT_HUNG_UP, EXIT_TERMINATED, UsageError
from .host import remote as remotes
from .run.history import Rows

if TYPE_CHECKING:
    import tensorflow as tf

    from ..engine import Trainer
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
    """Runs what the keywords ask for: `run(PlaneTrainer, data=data, train_steps=100, learning_rate=0.1)`.

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
      UsageError: a mistake in what was asked (a ValueError); the message is the line that the program would print.
      RunError: the run failed (a RuntimeError), likewise; its cause is the exception that ended it.

    Example:
      >>> run(PlaneTrainer, data=data, train_steps=100, learning_rate=0.1).result["eval"]  # doctest: +SKIP
    """
    with explanations.as_lines(), flagsaver.flagsaver():
        own_files.check_trainer(trainer_class)
        for name in (name for names in our_flags.GROUPS.values() for name in names):
            flags.FLAGS[name].unparse()
        own = train.read_flags([_NAME, *given.words(keywords)]) - set(may_change)
        asked = config.from_flags(
            *(trainer_class, data is not None, os.environ, own),
            owns_process=False,
            remote=remotes.of(flags.FLAGS["run_dir"].value),
        )
        checks.check(asked)
        check_baseline(asked)
        done = train.perform(asked, data, hooks)
    if done.code in (EXIT_HUNG_UP, EXIT_TERMINATED):
        signal.raise_signal(done.code - 128)
    if done.session is None:  # a task that served a coordinator, until that one ended
        raise SystemExit(done.code)
    return Run(done)


class Run:
    """The outcome of a run.

    Attributes:
      result: as `result.json` has it, plain JSON: step, train, eval, steps_per_sec, stop and more.
      history: `Rows`, one for each window of training metrics or evaluation.
      run_dir: where its files are; None if there are none.
    """

    def __init__(self, done: train.Done):
        self.result = done.result
        self.history = Rows(done.history)
        self.run_dir: str | None = done.session.config.given_run_dir
        self._session = done.session
        self._forward: Callable | None = None

    def __repr__(self) -> str:
        metrics = self.result.get("eval") or self.result.get("train") or {}
        shown = "".join(f", {name}={value:.6g}" for name, value in sorted(metrics.items()) if value is not None)
        return f"Run(step={self.result['step']}{shown}, run_dir={self.run_dir!r})"

    @property
    def trainer(self) -> Trainer:
        """The trainer of the run."""
        return self._session.trainer

    @property
    def model(self) -> tf.keras.Model:
        """The trained Keras model, with the last weights; with their moving average, if there is one.

        After training on one device it is the model that was trained; after replicas or servers, a copy on this
        process's device.
        """
        return self._weights.trained(self._session)

    def best_model(self) -> tf.keras.Model:
        """Returns a Keras model with the weights of the best evaluation by --monitor.

        Raises:
          UsageError: none was kept.
        """
        manifest = self._session.best.latest() if self._session.best else None
        if manifest is None:
            raise UsageError("no best checkpoint was kept; give run_dir=..., and data with a split to evaluate on")
        return self._weights.restored(self._session, manifest.prefix)

    @property
    def names(self) -> Names:
        """What the model's numbers stand for: `classes`, by label number, and `ids(features)`, which looks up text."""
        return self._session.names

    def predict(self, features) -> Any:
        """Computes the outputs of `Trainer.forward` for a batch of any size as NumPy arrays, 16-bit ones as float32.

        Args:
          features: as the data's: an array, a dictionary or a tuple of arrays, whose first axis is examples; what was
            text before it was looked up for training may be text or ids. They are computed `eval_batch_size` at a
            time, with the weights that evaluations use.
        """
        from .run import predictions

        if self._forward is None:
            self._forward = predictions.forward(self._session)
        return self._forward(features)

    def generate(
        self,
        prompt: str | Sequence[int] = "",
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 40,
        seed: int | None = None,
    ) -> str | list[int]:
        """Returns what a language model says after a prompt, up to a document's end, with evaluation's weights.

        Args:
          prompt: text, of a run on text, which the model reads as a document's beginning; then text is returned. Or
            tokens, one or more, read as they are; then tokens are.
          tokens: how many, at most.
          temperature: 0 always takes the likeliest.
          top_k: of how many of the likeliest to draw; 0 is all.
          seed: decides what is drawn; None is the run's.

        Raises:
          UsageError: the model tells no next token (`engine.generation.Generates`), the prompt is none, or an argument
            is out of range.
        """
        from .run import generation

        drawn = {} if seed is None else {"seed": seed}
        how = {"tokens": tokens, "temperature": temperature, "top_k": top_k, **drawn}
        with self._session.strategy.watch():
            return generation.text_after(self._session, prompt, **how)

    def evaluate(self, data) -> dict[str, float]:
        """Computes the metrics' means over a split, (features, labels) or a `tf.data.Dataset` of single examples."""
        from .run import predictions

        return predictions.evaluate(self._session, data)

    @property
    def _weights(self):
        from .run import weights

        return weights


def load_model(run_dir: str | os.PathLike, which: str | int = "latest", trainer_class: type | None = None):
    """Loads the Keras model of a run, with a checkpoint's weights: their moving average, if the run has one.

    Its attribute `names` says what its numbers stand for, as `Run.names`.

    Args:
      run_dir: of a run that trained.
      which: "latest", "best", or the step of a checkpoint that was kept.
      trainer_class: the run's own Trainer; needed for a model that Keras can't make from its configuration (one that
        is subclassed, or has layers that are not registered with `keras.saving.register_keras_serializable`).

    Raises:
      UsageError: the folder holds no such checkpoint, or the model can't be made.

    Example:
      >>> load_model("runs/plane", "best")(features)  # doctest: +SKIP
    """
    from .run import weights

    with explanations.as_lines():
        own_files.check_trainer(trainer_class)
        if not isinstance(path := os.fspath(run_dir) if isinstance(run_dir, os.PathLike) else run_dir, str):
            raise UsageError(f"load_model({run_dir!r:.60}): give the path of a run's folder")
        remote = remotes.of(path)
        return weights.load(remote.folder if remote else path, str(which), trainer_class)
