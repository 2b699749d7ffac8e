"""`crankshaft.fit`: trains a compiled Keras model as `model.fit` does, by Crankshaft's loop.

Converts the arguments of Keras's `fit`: data to splits, lengths to flags, callbacks to one hook.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import numbers
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from ..engine import logging
from ..engine.arguments import nearest, parameters
from ..engine.data import frames
from ..engine.data.entry import user_data, views
from ..engine.data.preprocessing import Preprocessing
from ..engine.data.run_data import Data
from ..engine.data.source import Source
from ..engine.data.streamed import Stream, is_off
from ..engine.strategies.registry import CLUSTERED
from ..parts.keras_models import keras_internals
from ..parts.keras_models.keras_callbacks import KerasCallbacks
from ..parts.keras_models.keras_compile import untracked_optimizer
from ..parts.keras_models.keras_trainer import KerasTrainer
from ..runner import explanations
from ..runner.command_line import parsing
from ..runner.command_line.flags import FIELDS
from ..runner.failures import UsageError
from . import api
from .composition.compiled_cache import CompiledCache

# Names that people try, flags among them, and what `fit` takes instead.
_ARGUMENTS = {
    "train_epochs": "epochs",
    "train_steps": "epochs and steps_per_epoch",
    "global_batch_size": "batch_size",
    "eval_batch_size": "validation_batch_size",
    "eval_every_steps": "validation_freq",
    "progress": "verbose",
    "input": "x",
    "lr": "the optimizer's learning_rate, in compile",
    "loss": "compile(loss=...)",
    "metrics": "compile(metrics=...)",
    **dict.fromkeys(("workers", "use_multiprocessing", "max_queue_size"), "that of a PyDataset, or leave it out"),
}
_MODES = ("train_and_eval", "train")
_COUNTS = {  # the minimum of each, and whether it may be None
    "epochs": (1, False),
    "initial_epoch": (0, False),
    **dict.fromkeys(("batch_size", "steps_per_epoch", "validation_steps", "validation_batch_size"), (1, True)),
}
_CHOICES = {"verbose": ("auto", 0, 1, 2), "shuffle": (True, False, None)}
_PROGRESS = {0: "off", 1: "auto", 2: "plain", "auto": "auto"}
_BATCH_SIZE = 32  # Keras's
_DATA_FLAGS = ("global_batch_size", "eval_batch_size", "shuffle_buffer")
_COMPONENTS = ("x", "y", "sample_weight")  # components of a function's result
_INPUT_ARGUMENTS = ("y", "sample_weight", "class_weight", "validation_data", "validation_steps")
_RULES = user_data.Rules(as_keras=True, weighs_outputs=True)


@explanations.explained
def fit(
    model: tf.keras.Model | Callable[..., tf.keras.Model],
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: int | str = "auto",
    callbacks: Sequence[Any] | None = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Sequence[int] = 1,
    *,
    hooks: Sequence[Any] = (),
    **flags: Any,
) -> api.Run:
    """Trains a compiled Keras model with the names and defaults of its own `fit`, and returns the run.

    One device, or the MirroredStrategy in whose scope the model was made, trains the model itself, else a copy. It then
    has the trained weights and its optimizer its state, so a second call continues from there. The run's
    `history.history` is Keras's. A mistake is a `UsageError`. Exceptions of callbacks, hooks and data are unchanged.

    Args:
      model: a compiled model; or a function that makes it, for strategies of several processes, which must exist first.
      x: array, dictionary or list of arrays, data frame, `tf.data.Dataset`, `PyDataset` or generator of batches,
        `Source`, an input's name, or a function without arguments that returns x or (x, y). A dataset and a
        generator keep their order.
      y: labels, in the structure of the model's outputs; None if x comes with them.
      batch_size: global batch size; None is that of batches in x, or else the examples over `steps_per_epoch`, or 32.
      epochs: the epoch at which the run ends, counted from 0.
      verbose: 0 is silent, 1 and "auto" a bar on a terminal, 2 lines.
      callbacks: Keras's. The folder of a `BackupAndRestore` is the run's run_dir, unless `run_dir` is passed.
      validation_split: fraction of the examples, the last ones, for evaluation.
      validation_data: (x, y), (x, y, weights), or any form of x.
      shuffle: whether each epoch has its own order.
      class_weight: weights by class; other classes weigh 1.
      sample_weight: one number per example; or an array [examples, steps] for the steps of sequences; or one of either
        per output, in a list or dictionary like the outputs, in which None or a missing name is 1.
      initial_epoch: the number of the first epoch.
      steps_per_epoch: steps from one `on_epoch_end` to the next, fewer where the data ends; None is all of the data.
      validation_steps: batches per evaluation; None is all.
      validation_batch_size: batch size of evaluations of data that does not come in batches; None is `batch_size`.
      validation_freq: epochs from one evaluation to the next, or a list of the epochs after which to evaluate, from 1.
      hooks: `engine.hooks`, in addition to the callbacks.
      **flags: flags of `crankshaft.run`, such as run_dir, strategy, num_virtual_devices, jit, seed.

    Example:
      >>> model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
      >>> model.compile("sgd", "mse")
      >>> run = fit(model, tf.ones([8, 1]), tf.ones([8, 1]), epochs=3, verbose=0, jit="off")
      >>> len(run.history.history["loss"])
      3
    """
    return _train(Arguments(**locals()))


class Arguments(types.SimpleNamespace):
    """The arguments of `fit`, by their names."""

    def replaced(self, **values: Any) -> Arguments:
        """Returns these arguments with other values of some."""
        return Arguments(**{**vars(self), **values})

    @property
    def is_model(self) -> bool:
        """Whether a model was passed, not a function that makes it."""
        return isinstance(self.model, tf.keras.layers.Layer)

    @property
    def names_input(self) -> bool:
        return isinstance(self.x, str)

    @property
    def run_epochs(self) -> int:
        return max(0, self.epochs - self.initial_epoch)

    @property
    def epoch_steps(self) -> int | None:
        """The steps of an epoch: whole executions, as in Keras; a function's model has not been made."""
        stride = self.model.steps_per_execution if self.is_model else 1
        return self.steps_per_epoch and -(-self.steps_per_epoch // stride) * stride

    @property
    def eval_fraction(self) -> float:
        """The fraction of the examples to evaluate on."""
        return self.validation_split if self.validation_data is None else 0.0


def _train(arguments: Arguments) -> api.Run:
    for name in _ARGUMENTS.keys() & arguments.flags.keys():
        raise UsageError(f"fit has no {name}; use {_ARGUMENTS[name]}")
    names = [*parameters(fit), *(name for name in FIELDS if name not in _ARGUMENTS)]
    for name in arguments.flags.keys() - {*names, *parsing.script_flag_names()}:
        raise UsageError(f"{name} is unknown; {nearest(name, names, 'see help(crankshaft.fit)')}")
    _check(arguments)
    arguments = _limited(arguments)
    trainer_class = KerasTrainer.for_model(arguments.model)
    is_mirrored = isinstance(trainer_class.strategy(), tf.distribute.MirroredStrategy)  # the model was made so
    callbacks_as_hooks = [hook for hook in arguments.hooks if isinstance(hook, tf.keras.callbacks.Callback)]
    callbacks = [*tf.nest.flatten(arguments.callbacks or []), *callbacks_as_hooks]
    packages = {type(callback).__module__.partition(".")[0] for callback in callbacks}
    if (module := keras_internals.fit_module()).partition(".")[0] not in {"keras", *packages}:
        logging.warning_once(
            "keras.Model.fit is %s's, which crankshaft.fit does not call: what it logs is not logged; give its "
            "callback, such as mlflow.tensorflow.MlflowCallback()",
            module,
        )
    backups = [callback for callback in callbacks if isinstance(callback, tf.keras.callbacks.BackupAndRestore)]
    hook = KerasCallbacks(
        [callback for callback in callbacks if callback not in backups],
        epoch_steps=arguments.epoch_steps,
        first_epoch=arguments.initial_epoch,
        epochs=arguments.run_epochs,
        eval_epochs=arguments.validation_freq,
        verbose=0 if arguments.verbose == "auto" else int(arguments.verbose),
    )
    # `Hook.last_step` ends the run earlier where callbacks or epochs say so.
    length: dict[str, Any] = {"train_epochs": max(1, arguments.run_epochs)}
    if steps := arguments.epoch_steps:
        length = {"train_steps": max(1, arguments.run_epochs) * steps}
        if arguments.validation_data is not None or arguments.validation_split > 0 or arguments.names_input:
            length["eval_every_steps"] = steps
    is_function = _makes_data(arguments.x)
    train = None if arguments.names_input or is_function else _train_split(arguments)
    flags = {
        "input": arguments.x if arguments.names_input else None,
        "validation_split": arguments.eval_fraction,
        "progress": _PROGRESS[arguments.verbose],
        "strategy": "mirrored" if is_mirrored else None,
        "run_eagerly": (arguments.is_model and arguments.model.run_eagerly) or None,
        **({} if is_function else _data_flags(arguments, train)),
        **length,
        **arguments.flags,
        **(_backup_flags(backups[0], arguments, train) if backups else {}),
    }
    data = None if arguments.names_input else functools.partial(_load_data, arguments, train)
    set_by_data = {name for name in _DATA_FLAGS if flags.get(name) is None} if is_function else ()
    hooks = [*(other for other in arguments.hooks if other not in callbacks_as_hooks), hook]
    # A run's checkpoints have the optimizer once, as the engine's.
    with untracked_optimizer(arguments.model) if arguments.is_model else contextlib.nullcontext():
        run = api.run_within(trainer_class, data=data, hooks=hooks, set_by_data=set_by_data, **flags)
    run.history.history, run.history.epoch = hook.history.history, hook.history.epoch
    if arguments.is_model:
        arguments.model.history = hook.history
    api.raise_signal_again(run)
    if arguments.is_model and not run.code:
        CompiledCache.store(run.config, run.inputs, run.strategy, run.train_steps)
    if backups and _removes(backups[0], arguments) and run.config.writes_run and not run.code:
        backups[0].on_train_end()  # which removes the folder
        run.run_dir = None
    return run


def _limited(arguments: Arguments) -> Arguments:
    """Limits the arguments as `keras.config` does, for trying a program."""
    epochs, steps = tf.keras.config.max_epochs(), tf.keras.config.max_steps_per_epoch()
    if epochs and epochs < arguments.epochs:
        logging.warning("keras.config.set_max_epochs(%d) limits epochs", epochs)
        arguments = arguments.replaced(epochs=epochs)
    if steps and steps < (arguments.steps_per_epoch or steps + 1):
        logging.warning("keras.config.set_max_steps_per_epoch(%d) limits steps_per_epoch", steps)
        arguments = arguments.replaced(steps_per_epoch=steps)
    return arguments


def _backup_flags(
    backup: tf.keras.callbacks.BackupAndRestore, arguments: Arguments, train: Source | Stream | None
) -> dict[str, Any]:
    """Replaces a callback by flags, and logs the replacement."""
    every = arguments.steps_per_epoch
    if backup.save_freq != "epoch":
        every = int(backup.save_freq)
    elif every is None and train is not None and train.by_index:  # else counting would take reading the data
        every = -(-_examples(arguments, train) // _batch_size(arguments, train))
    replacing = {"run_dir": backup.backup_dir, "checkpoint_every_steps": every}
    flags = {name: value for name, value in replacing.items() if arguments.flags.get(name) is None}
    stays = "stays, so that the same call trains no further then"
    removed = "is removed at the end of the training (delete_checkpoint=False keeps it)"
    logging.warning(
        "BackupAndRestore: run_dir=%s resumes the run in its place, and %s",
        *({**arguments.flags, **flags}["run_dir"], removed if _removes(backup, arguments) else stays),
    )
    return flags


def _removes(backup: tf.keras.callbacks.BackupAndRestore, arguments: Arguments) -> bool:
    # A run_dir that the call gives is the user's own, and stays.
    return backup.delete_checkpoint and arguments.flags.get("run_dir") is None


def _makes_data(x: Any) -> bool:
    return callable(x) and not isinstance(x, tf.keras.utils.PyDataset)


def _train_split(arguments: Arguments) -> Source | Stream:
    dataset = tf.keras.utils.PyDataset
    if isinstance(arguments.x, dataset) and type(arguments.x).on_epoch_end is not dataset.on_epoch_end:
        logging.warning_once(
            "Keras's fit calls on_epoch_end of a PyDataset once more, before its first epoch, and this fit not; for "
            "Keras's batches call it in %s.__init__",
            type(arguments.x).__name__,
        )
    data = (arguments.x, arguments.y, arguments.sample_weight)
    may_be_uneven = arguments.flags.get("accumulate_steps") in (None, 1)
    return _split(arguments, "x", data, arguments.steps_per_epoch, True, may_be_uneven)


def _split(
    arguments: Arguments, name: str, data: Any, steps: int | None, is_even: bool, may_be_uneven: bool = True
) -> Source | Stream:
    """Converts the data of training, or of evaluations, whose batches are each a step's."""
    strategy, policy = (arguments.flags.get(flag) for flag in ("strategy", "auto_shard_policy"))
    is_part = strategy in CLUSTERED and (policy in ("file", "off") or is_off(data[0]))
    by_batch = may_be_uneven and strategy not in ("parameter_server", "tpu") and not is_part
    rules = dataclasses.replace(_RULES, is_even=is_even, by_batch=by_batch, ends=steps is None)
    return user_data.split(name, data, rules)


def _first_batches(split: Source | Stream, batches: int, size: int) -> Source | Stream:
    return views.first(split, batches if isinstance(split, Stream) and split.by_batch else batches * size)


def _data_flags(arguments: Arguments, train: Source | Stream | None) -> dict[str, Any]:
    """Derives flags from the form of the training data; None: it is an input's."""
    size = _batch_size(arguments, train)
    if not arguments.epoch_steps and _never_ends(train):
        raise UsageError("the dataset never ends, so it has no epoch; give steps_per_epoch")
    keeps_order = not arguments.shuffle or (train is not None and not train.by_index)
    sizes = {"global_batch_size": size, "eval_batch_size": arguments.validation_batch_size or size}
    return {**sizes, **({"shuffle_buffer": 0} if keeps_order else {})}


def _load_data(arguments: Arguments, train: Source | Stream | None) -> Data:
    """Loads the run's data; `train` is None if x is a function, which is called."""
    if _makes_data(arguments.x):
        x = arguments.x()
        if not isinstance(x, tuple) or arguments.y is not None:
            arguments = arguments.replaced(x=x)
        elif not 1 <= len(x) <= len(_COMPONENTS):
            raise UsageError(f"x returned {len(x)} values; return x, (x, y) or (x, y, weights)")
        else:
            arguments = arguments.replaced(**dict(zip(_COMPONENTS, x, strict=False)))
    train = _train_split(arguments) if train is None else train
    flags = _data_flags(arguments, train)
    is_alone = arguments.flags.get("strategy") not in CLUSTERED  # others count the data
    is_uncounted = isinstance(train, Stream) and not train.ends and train.length == tf.data.UNKNOWN_CARDINALITY
    if arguments.epoch_steps and is_alone and is_uncounted:
        logging.warning(
            "steps_per_epoch=%d: where the dataset ends, which only reading shows, it begins again within an epoch; "
            "Keras would end the epoch; dataset.apply(tf.data.experimental.assert_cardinality(batches)) ends epochs",
            arguments.epoch_steps,
        )
    if _never_ends(train):
        batches = max(1, arguments.run_epochs) * (arguments.epoch_steps or 0)
        train = _first_batches(train, batches, flags["global_batch_size"])
    evaluation, steps, columns = None, arguments.validation_steps, frames.column_names(arguments.x)
    if arguments.validation_data is not None:
        data = arguments.validation_data() if _makes_data(arguments.validation_data) else arguments.validation_data
        data = data if isinstance(data, (tuple, list)) else (data,)
        if columns and (others := frames.column_names(data[0])) not in (None, columns):
            raise UsageError(
                f"validation_data has the columns {', '.join(others or ())}, and x has "
                f"{', '.join(columns)}; give the same, in the same order"
            )
        evaluation = _split(arguments, "validation_data", data, steps, steps is not None)
        size = evaluation.batch_examples or arguments.validation_batch_size or arguments.batch_size
        if steps is not None and size:  # Keras divides arrays without a size by the steps, so that all are evaluated
            evaluation = _first_batches(evaluation, steps, size)
    preprocessing = Preprocessing(array=columns or ())
    return Data(train, evaluation, preprocessing=preprocessing, class_weight=arguments.class_weight, flags=flags)


def _check(arguments: Arguments) -> None:
    """Raises `UsageError` for an argument of a type or value that `fit` does not take."""
    if (mode := arguments.flags.get("mode", _MODES[0])) not in _MODES:
        raise UsageError(f"mode={mode!r}: fit trains; give {' or '.join(map(repr, _MODES))}, or use crankshaft.run")
    for name, (least, may_be_none) in _COUNTS.items():
        value = getattr(arguments, name)
        if not _is_count(value, least) and not (may_be_none and value is None):
            raise UsageError(f"{name}={value!r} can't be used; give a whole number of {least} or more")
    frequency = arguments.validation_freq
    epochs = frequency if isinstance(frequency, (list, tuple)) else [frequency]
    if not epochs or not all(map(_is_count, epochs)):
        raise UsageError(
            f"validation_freq={frequency!r} can't be used; give a whole number of 1 or more, or a list of such"
        )
    for name, values in _CHOICES.items():
        if not isinstance(value := getattr(arguments, name), (int, str, type(None))) or value not in values:
            raise UsageError(f"{name}={value!r} is not known; use {' or '.join(map(repr, values))}")
    fraction = arguments.validation_split
    if not isinstance(fraction, numbers.Real) or not 0 <= float(fraction) < 1:
        raise UsageError(f"validation_split={fraction!r} can't be used; give a share from 0 to below 1")
    for callback in tf.nest.flatten(arguments.callbacks or []):
        if not isinstance(callback, tf.keras.callbacks.Callback):
            raise UsageError(
                f"callbacks={callback!r:.60} is not a tf.keras.callbacks.Callback; give objects of such a class"
            )
    if arguments.x is None:
        raise UsageError("x is missing; pass an array, or a dictionary or list of arrays")
    if arguments.is_model and (strategy := arguments.flags.get("strategy")) in CLUSTERED:
        raise UsageError(
            f"strategy={strategy} has to be there before a model is made; give fit a function that makes and compiles "
            "the model, and one that returns the data if that is TensorFlow's"
        )
    if isinstance(data := arguments.validation_data, (tuple, list)) and not 1 <= len(data) <= 3:
        raise UsageError(f"validation_data has {len(data)} components; pass (x, y), (x, y, weights), or what x may be")
    if not isinstance(arguments.hooks, Sequence):
        raise UsageError(f"hooks={arguments.hooks!r:.60} is not a list; give a list of engine.hooks")
    for name in _INPUT_ARGUMENTS if arguments.names_input else ():
        if getattr(arguments, name) is not None:
            raise UsageError(f"x={arguments.x!r} names an input, which has all of its own; leave {name} out")
    if arguments.validation_steps and arguments.eval_fraction:
        raise UsageError("validation_steps counts batches of validation_data; give that, or leave validation_steps out")


def _is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def _batch_size(arguments: Arguments, train: Source | Stream | None) -> int:
    """Chooses the examples per step: the batch size of x, if it is batched."""
    size = train.batch_examples if train is not None else None
    if size and arguments.batch_size not in (None, size):
        raise UsageError(f"batch_size={arguments.batch_size}, and x comes in batches of {size}; leave batch_size out")
    if size := size or arguments.batch_size:
        return size
    if train is not None and train.by_index and arguments.steps_per_epoch:
        return -(-_examples(arguments, train) // arguments.steps_per_epoch)
    return _BATCH_SIZE


def _examples(arguments: Arguments, train: Source) -> int:
    return math.floor(len(train) * (1 - arguments.eval_fraction))


def _never_ends(train: Source | Stream | None) -> bool:
    return isinstance(train, Stream) and train.length == tf.data.INFINITE_CARDINALITY
