"""Checks the hooks that a user gives to a run, Keras callbacks among them. Host code."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from ...engine.hooks import Hook
from ...engine.hooks.keras_callbacks import KerasCallbacks
from ..errors import UsageError


def checked(hooks: Sequence) -> list:
    """Checks the user's hooks: each is an `engine.hooks.Hook`; Keras callbacks become one hook, the last.

    Raises:
      UsageError: one is neither.
      ValueError: a callback needs Keras's own loop.
    """
    if not isinstance(hooks, Sequence):
        raise UsageError(f"hooks={hooks!r} is not a list; put hooks into one, hooks=[...]")
    callbacks = [hook for hook in hooks if isinstance(hook, tf.keras.callbacks.Callback)]
    others = [hook for hook in hooks if hook not in callbacks]
    for hook in others:
        if not isinstance(hook, Hook):
            raise UsageError(
                f"hook {hook!r} is neither an engine.hooks.Hook nor a Keras callback; wrap a function by every_epoch "
                "or every_steps"
            )
    return [*others, KerasCallbacks(callbacks)] if callbacks else others
