"""Keras's state of the process and the thread: defaults, names, policy, seeds. Runs on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from keras.src.backend.common import global_state

_CAN_BE: dict[str, Callable[[Any], bool]] = {
    "floatx": lambda value: value in ("bfloat16", "float16", "float32", "float64"),
    "epsilon": lambda value: isinstance(value, (int, float)) and value >= 0,
    "image_data_format": lambda value: value in ("channels_first", "channels_last"),
    "dtype_policy": lambda name: isinstance(name, str) and tf.keras.dtype_policies.get(name) is not None,
}
_DEFAULTS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "floatx": (tf.keras.config.floatx, tf.keras.config.set_floatx),
    "epsilon": (tf.keras.config.epsilon, tf.keras.config.set_epsilon),
    "image_data_format": (tf.keras.config.image_data_format, tf.keras.config.set_image_data_format),
}

_SAFE_MODE = "safe_mode_saving"  # by which `keras.config.enable_unsafe_deserialization` is noted


def defaults() -> dict[str, Any]:
    """Returns the defaults of Keras that are the process's, by name."""
    return {name: read() for name, (read, _) in _DEFAULTS.items()}


def is_default(name: str, value: Any) -> bool:
    """Returns whether a default of Keras's, the dtype policy among them, can have a value that was read from a file."""
    try:
        return name in _CAN_BE and _CAN_BE[name](value)
    except ValueError:  # Keras's form of a policy
        return False


def set_defaults(values: Mapping[str, Any]) -> None:
    """Sets the defaults of Keras that are the process's."""
    for name, value in values.items():
        _DEFAULTS[name][1](value)


def default_policy() -> tf.keras.DTypePolicy:
    """Returns this thread's default dtype policy; unlike Keras's function, which sets it, it leaves it to floatx."""
    policy = global_state.get_global_attribute("dtype_policy")
    return tf.keras.DTypePolicy(tf.keras.config.floatx()) if policy is None else policy


def initial_state(policy: str | None) -> dict[str, Any]:
    """Returns a new process's state for `exchange_state`, with this program's settings of how Keras prints and loads.

    Args:
      policy: the name of the default dtype policy; the program's, if it has this name, may be of a class of its own.
    """
    attributes = vars(global_state.GLOBAL_STATE_TRACKER)
    state = {name: attributes[name] for name in ("interactive_logging", _SAFE_MODE) if name in attributes}
    if policy is not None:
        programs = default_policy()
        state["dtype_policy"] = programs if programs.name == policy else tf.keras.dtype_policies.get(policy)
    return state


def loads_anything() -> bool:
    """Returns whether the program has called `keras.config.enable_unsafe_deserialization`."""
    return global_state.get_global_attribute(_SAFE_MODE) is False


def loaded_files(configuration: Any) -> Iterator[tuple[str, str]]:
    """Lists (layer's class, path) of the files that Keras would load as it makes a layer from its configuration."""
    parts = [configuration]
    for part in parts:  # grows
        if isinstance(part, Mapping):
            kind, config = str(part.get("class_name")).rpartition(">")[2], part.get("config")
            # A SavedModel's graph may read and write files. A vocabulary that is not a path is a list.
            name = "filepath" if kind == "TFSMLayer" else "vocabulary"
            path = config.get(name) if isinstance(config, Mapping) else ""
            if kind == "TFSMLayer" or (path and isinstance(path, str)):
                yield kind, str(path)
        inner = part.values() if isinstance(part, Mapping) else part
        parts += inner if isinstance(part, (Mapping, list, tuple)) else ()


@contextlib.contextmanager
def in_new_state() -> Iterator[None]:
    """Gives this thread a new process's state of Keras (names, policy, seed), so that users' layers are numbered on."""
    before = exchange_state({})
    try:
        yield
    finally:
        exchange_state(before)


def exchange_state(state: dict[str, Any]) -> dict[str, Any]:
    """Sets Keras's state in this thread to one that this returned, {} for a new process's; returns the former one."""
    attributes = vars(global_state.GLOBAL_STATE_TRACKER)  # a threading.local
    before = dict(attributes)
    attributes.clear()
    attributes.update(state)
    return before
