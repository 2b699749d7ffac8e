"""Checks the hooks that a user gives to a run, Keras callbacks among them. Host code."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from ...engine.hooks import Hook
from ...engine.hooks.keras_callbacks import KerasCallbacks
from ..command_line.config import Config
from ..errors import UsageError

# Callbacks that steer Keras's own loop, and the flags that do the same here.
_INSTEAD = {
    "BackupAndRestore": "--run_dir with --checkpoint_every_steps",
    "EarlyStopping": "--early_stopping with --monitor",
    "LearningRateScheduler": "--learning_rate_schedule",
    "ModelCheckpoint": "--checkpoint_every_steps, and --monitor for the best",
    "OrbaxCheckpoint": "--checkpoint_every_steps",
    "ProgbarLogger": "--progress",
    "ReduceLROnPlateau": "--reduce_lr with --monitor",
    "SwapEMAWeights": "--ema_decay",
    "TensorBoard": "--run_dir with --summary_every_steps",
    "TerminateOnNaN": "--on_nonfinite=raise, the default",
}


def checked(hooks: Sequence, config: Config) -> list:
    """Checks the user's hooks: each is an `engine.hooks.Hook`; Keras callbacks become one hook, the last.

    Raises:
      UsageError: one is neither, or a callback that needs Keras's own loop.
    """
    if not isinstance(hooks, Sequence):
        raise UsageError(f"hooks={hooks!r} is no list; put hooks into one, hooks=[...]")
    callbacks = [hook for hook in hooks if isinstance(hook, tf.keras.callbacks.Callback)]
    for callback in callbacks:
        if flags := _instead_of(callback):
            raise UsageError(f"Keras callback {type(callback).__name__} is for Keras's own loop; here {flags} does it")
    others = [hook for hook in hooks if hook not in callbacks]
    for hook in others:
        if not isinstance(hook, Hook):
            raise UsageError(
                f"hook {hook!r} is no engine.hooks.Hook and no Keras callback; wrap a function by every_epoch or "
                "every_steps"
            )
    return [*others, KerasCallbacks(callbacks, config.summary_every_steps)] if callbacks else others


def _instead_of(callback: tf.keras.callbacks.Callback) -> str | None:
    """Returns the flags that replace a callback that needs Keras's own loop; None for one that only observes."""
    kinds = {kind.__name__ for kind in type(callback).__mro__ if kind.__module__.startswith("keras.")}
    return next((cure for name, cure in _INSTEAD.items() if name in kinds), None)
