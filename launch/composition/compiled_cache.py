"""Caches a Keras model's compiled steps and trainer on the model, for the next `fit`.

As in Keras, a model's steps are compiled once until `compile` is called again, for the same form of data and the same
weights to train: what else a program changes of the model or of what its functions read takes effect then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from ...engine.internals import keras_state
from ...engine.machine.threads import PROCESS
from ...engine.state import TrainState
from ...engine.strategies import jit_choice
from ...engine.strategies.base import Strategy
from ...engine.strategies.inner_loop import Compiled, InnerLoop
from ...parts.keras_models import keras_compile
from ...parts.keras_models.keras_trainer import KerasTrainer
from ...runner.command_line.config import Config
from ...runner.command_line.flags import Flags
from ...runner.data.inputs import Inputs

# Flags that a compiled step does not depend on, and those that it depends on; others must have their defaults.
_FREE_FLAGS = ("train_epochs", "train_steps", "eval_every_steps", "validation_split", "progress")
_COMPARED_FLAGS = ("global_batch_size", "eval_batch_size", "shuffle_buffer", "seed", "jit", "strategy")
_MOST_PROGRAMS = 64  # one for each size of an epoch's last batch, and with XLA for each number of examples
_DEFAULTS = Flags()
ATTRIBUTE = "_kept_by_fit"  # attribute of the model


@dataclasses.dataclass(frozen=True)
class CompiledCache:
    """The trainer and the compiled steps of a model's last `fit`.

    Attributes:
      key: what must be equal for the cache to be used, see `_key`.
      trainer: trains the model itself.
      step_variable: variable that counts the trainer's steps.
      jit: value of `TrainState.jit`.
      compiled: compiled programs, by split.
      forms: forms of the feeds that these were compiled for, see `_forms`.
    """

    key: Mapping[str, Any]
    trainer: KerasTrainer
    step_variable: tf.Variable
    jit: bool | None
    compiled: Mapping[str, Compiled]
    forms: Mapping[str, Any]

    @staticmethod
    def store(config: Config, inputs: Inputs, strategy: Strategy, train_steps: int | None) -> None:
        """Stores what a run of a model compiled with the model, until that is freed."""
        state, programs, key = strategy.state, _programs(strategy), _key(config, inputs, train_steps)
        loops = all(isinstance(loop, InnerLoop) and not loop.writes_summaries for loop in programs.values())
        if key is None or not (loops and state.trainer.run_context.in_place):
            return
        forms = _forms(inputs)
        compiled = {split: programs[split].compiled.newest(_MOST_PROGRAMS) for split in forms}
        key = {**key, "model": state.trainer.compiled_state}  # a callback may have compiled the model since
        cache = CompiledCache(key, state.trainer, state.step_variable, state.jit, compiled, forms)
        vars(state.trainer.model)[ATTRIBUTE] = cache  # not by `setattr`, so that Keras and checkpoints do not track it

    @staticmethod
    def pop(config: Config, inputs: Inputs, train_steps: int | None) -> CompiledCache | None:
        """Removes the cache from a model; returns it if this run would trace its steps from the same."""
        cache: CompiledCache | None = vars(config.trainer_class.make()).pop(ATTRIBUTE, None)
        return cache if cache is not None and cache.key == _key(config, inputs, train_steps) else None

    def restarted(self, updates_before: int) -> TrainState:
        """Returns a state at step 0, of the same trainer; `updates_before` is that of `Inputs`."""
        with PROCESS:
            self.trainer.restart(updates_before)
        state = TrainState(self.trainer)
        state.build(self.step_variable)
        state.jit = self.jit
        return state

    def give_compiled(self, strategy: Strategy, inputs: Inputs) -> None:
        """Gives a strategy's programs what was compiled for feeds of the same form."""
        forms = _forms(inputs)
        for split, program in _programs(strategy).items():
            if split in forms and forms[split] == self.forms.get(split):
                program.compiled = self.compiled[split]


def _programs(strategy: Strategy) -> dict[str, Any]:
    programs = {"train": strategy.training, "eval": strategy.evaluation}  # of a compiled model, one set's
    return {split: program for split, program in programs.items() if program is not None}


def _forms(inputs: Inputs) -> dict[str, Any]:
    """The forms of the feeds by split, without those whose programs can't serve another feed."""
    return {split: (type(feed), feed.form) for split, feed in inputs.feeds.items() if feed.form is not None}


def _key(config: Config, inputs: Inputs, train_steps: int | None) -> dict[str, Any] | None:
    """Everything that a trainer and its compiled step depend on; None if such a run reuses neither."""
    changed = {name: value for name, value in config.values.items() if value != getattr(_DEFAULTS, name)}
    form = _forms(inputs).get("train")
    if changed.keys() - {*_FREE_FLAGS, *_COMPARED_FLAGS} or form is None:
        return None
    return {
        "flags": {name: getattr(config, name) for name in _COMPARED_FLAGS},
        "model": keras_compile.CompiledState(config.trainer_class.make()),
        "form": form,
        "classes": inputs.data_info.num_classes,
        "of_keras": keras_state.defaults(),
        "eager": tf.config.functions_run_eagerly(),
        "is_short": jit_choice.is_short(train_steps),  # its steps are not unrolled
    }
