"""Models, inputs, optimizers and schedules, found by name, and the arguments that each takes.

A name's module is imported and read by `inspect.signature`; all but the inputs need TensorFlow for it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from types import ModuleType
from typing import Any

from ... import input as inputs
from ...engine.arguments import COUNT, DECAY, FROM_ZERO, Expression, Interval, outside
from ...engine.arguments import parameters as parameters_of
from ...engine.step.options import WEIGHT_DECAY_EXCLUDE
from ..failures import UsageError, nearest
from . import user_files
from .rules import UntypedText
from .values import boolean, guessed, number

_BRACKETS = re.compile(r"\s*(?:\[(.*)\]|\((.*)\))\s*", re.DOTALL)  # around a list
_FROM_FLAGS = ("eval_data_dir", "validation_split", "trained_on", "keeps_ids", "needs_labels")
# Models stand above what a run is made of, and are imported by their names.
_PACKAGES = {"model": "crankshaft.models", "input": inputs.__name__}
NAMES: dict[str, tuple[str, ...]] = {
    "model": ("cnn", "dlrm", "logistic", "mlp", "resnet", "transformer_lm", "wide_deep"),
    "input": inputs.NAMES,
}
# The intervals of our models' arguments.
_MODEL_INTERVALS = {
    **dict.fromkeys(("dropout", "batch_norm_momentum"), DECAY),  # dropping everything would leave nothing to train on
    **dict.fromkeys(("hidden_units", "bottom_units", "top_units"), COUNT),
}
# Arguments of an optimizer that have a flag of their own, by which the engine does the same itself.
_ARGUMENTS_OF_FLAGS = set(
    "learning_rate weight_decay weight_decay_exclude global_clipnorm use_ema ema_momentum ema_overwrite_frequency "
    "loss_scale_factor gradient_accumulation_steps name of_options".split()
)
# Arguments of every optimizer, by Keras's names, that the engine does itself: its own names for them.
CLIPS = {"clipnorm": "clip_variable_norm", "clipvalue": "clip_value"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model or input, or an optimizer or schedule, with its arguments.

    Attributes:
      summary: the first line of its documentation.
      defaults: argument name -> default value.
      required: arguments without a default.
      intervals: the interval of an argument's values, by name, if it has one.
      path: path of a file of the user's own; None for modules of Crankshaft.
      from_flags: keywords of an input's `load` that the configuration fills by their names.
      fitted: arguments of an input that only decide what is fitted to its data: `FITTED` of its module.
      make: class of the model, or `load` of the input.
    """

    name: str
    summary: str
    defaults: Mapping[str, Any]
    required: tuple[str, ...] = ()
    intervals: Mapping[str, Interval | Expression] = dataclasses.field(default_factory=dict)
    path: str | None = None
    from_flags: tuple[str, ...] = ()
    fitted: tuple[str, ...] = ()
    make: Any = None

    @property
    def reads_eval_data(self) -> bool:
        """Whether an input takes --eval_data_dir."""
        return "eval_data_dir" in self.from_flags


def check_name(kind: str, name: str | None) -> None:
    """Raises `UsageError` unless --model or --input names one that is there; imports nothing."""
    names = NAMES[kind]
    if name is None:
        raise UsageError(f"{kind} is missing; use one of {', '.join(names)}")
    if user_files.is_path(name):
        user_files.compile_file(kind, name)
    elif user_files.whole_name(kind, name) not in names and not user_files.is_own(name):
        raise UsageError(f"{kind}={name} is unknown; {nearest(name, names)}")


def find(kind: str, name: str | None, to_trainer: Callable[[ModuleType], type | None] | None = None) -> Entry:
    """Imports the model or input of that name, or the file at that path, or the module of a package.

    Args:
      to_trainer: makes a Trainer of the compiled Keras model that a file may have; see `launch.program`.

    Raises:
      UsageError: it does not exist, or has no `Model` or `load`; exceptions of its module pass through.
    """
    check_name(kind, name)
    name, path, wanted = str(name), name if user_files.is_own(name) else None, user_files.NEEDED[kind].split()[-1]
    if user_files.is_path(name):
        module = user_files.run_file(kind, name)
    elif path:
        name = user_files.whole_name(kind, path)
        module, wanted = user_files.load_module(kind, name)
    else:
        module = importlib.import_module(f"{_PACKAGES[kind]}.{name}")
    found = getattr(module, wanted, None)
    entry = _model(module, found, path, to_trainer) if kind == "model" else _input(module, found, path)
    name = str(user_files.portable_name(name))
    return dataclasses.replace(entry, name=name, summary=_summary(module), path=path)


def _model(module, model, path: str | None, to_trainer: Callable[[ModuleType], type | None] | None) -> Entry:
    from ...engine.trainer import Trainer

    if model is None and to_trainer:
        model = to_trainer(module)
    if model is None:
        raise user_files.missing_error("model", path)
    if not (isinstance(model, type) and issubclass(model, Trainer)):
        raise user_files.missing_error("model", path, "a Model that is not a Trainer")
    return dataclasses.replace(class_entry(model), intervals={} if path else _MODEL_INTERVALS)


def _input(module, load, path: str | None) -> Entry:
    if not callable(load):
        raise user_files.missing_error("input", path)
    parameters = [*parameters_of(load).values()]
    if sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters) < 2:
        raise user_files.missing_error("input", path, "a load without the arguments data_dir and seed")
    arguments = [parameter for parameter in parameters[2:] if parameter.name not in _FROM_FLAGS]
    from_flags = tuple(parameter.name for parameter in parameters[2:] if parameter.name in _FROM_FLAGS)
    fitted = getattr(module, "FITTED", ())
    return Entry("", "", *_arguments(arguments), from_flags=from_flags, fitted=fitted, make=load)


def class_entry(trainer_class: type) -> Entry:
    """Makes the entry of a Trainer."""
    arguments = _arguments(parameters_of(trainer_class).values())
    return Entry(trainer_class.__name__, _summary(trainer_class), *arguments, make=trainer_class)


def optimizer(name: str) -> Entry:
    """Finds the optimizer of a name, the engine's, Keras's or a package's. Raises `UsageError`."""
    import tensorflow as tf

    from ...engine import optimizers as engine
    from ...engine.optimizers.rules import ARGUMENTS

    rules = engine.named()
    if user_files.is_own(name):
        module, wanted = user_files.load_module("optimizer", name)
        rules = {name: getattr(module, wanted, type(None))}
        if not (isinstance(rules[name], type) and issubclass(rules[name], engine.Optimizer | tf.keras.Optimizer)):
            raise user_files.missing_error("optimizer", name, f"no class {wanted} that is an optimizer")
    if name not in rules:
        raise UsageError(f"optimizer={name} is unknown; {nearest(name, rules)}")
    elsewhere = _ARGUMENTS_OF_FLAGS | CLIPS.keys()
    parameters = [parameter for parameter in parameters_of(rules[name]).values() if parameter.name not in elsewhere]
    common = {**dict.fromkeys(CLIPS, 0.0), "weight_decay_exclude": WEIGHT_DECAY_EXCLUDE, "ema_warmup": True}
    defaults = {**_arguments(parameters)[0], **common}
    return Entry(name, _summary(rules[name]), defaults, intervals={} if user_files.is_own(name) else ARGUMENTS)


def schedules() -> Mapping[str, Entry]:
    """Finds the engine's learning-rate schedules."""
    from ...engine.optimizers import schedules as engine

    return {
        name: Entry(name, "", _arguments([*parameters_of(make).values()][2:])[0], intervals=engine.ARGUMENTS)
        for name, make in engine.named().items()
    }


_LEAST = {"patience": COUNT, "min_delta": FROM_ZERO}
# The arguments of flags that name nothing else; required ones are required if any is set.
ENTRIES = {
    "outer_arg": Entry(
        "the step of local SGD",
        "",
        {"learning_rate": 0.7, "momentum": 0.9},
        intervals={"learning_rate": FROM_ZERO, "momentum": DECAY},
    ),
    "early_stopping": Entry("early stopping", "", {"min_delta": 0.0}, ("patience",), _LEAST),
    "reduce_lr": Entry(
        "the plateau",
        "",
        {"factor": 0.1, "min_delta": 1e-4},
        ("patience",),
        {**_LEAST, "factor": Interval(above=0, below=1)},
    ),
    "benchmark_arg": Entry(
        "benchmark mode",
        "",
        {"steps": None, "seconds": None, "rounds": 3, "profile": False, "fail_below": None},
        intervals={
            "steps": COUNT,
            "seconds": Interval(above=0, upper=1e6),
            "rounds": COUNT,
            "fail_below": Interval(lower=0, upper=1e6),
        },
    ),
    "sampling": Entry(
        "sampling tokens",
        "",
        {"tokens": 200, "temperature": 0.8, "top_k": 40},
        intervals={
            "tokens": COUNT,
            "temperature": Interval(lower=0, upper=1000),
            "top_k": Interval(lower=0, upper=2**31 - 1, whole=True),
        },
    ),
}


def coerce_arguments(flag: str, values: Mapping[str, Any], entry: Entry) -> dict[str, Any]:
    """Converts arguments to the types of the entry's defaults. Raises `UsageError`.

    Args:
      values: values of the arguments by name, as `rules.coerce` returns them.
    """
    names = {*entry.defaults, *entry.required}
    arguments = {}
    for name, value in values.items():
        if not names:
            raise UsageError(f"{flag} {name}={value}: {entry.name} takes no arguments; leave it out")
        if name not in names:
            raise UsageError(f"{flag} {name}: {entry.name} has no such argument; {nearest(name, names)}")
        if isinstance(value, UntypedText) and (more := names.intersection(re.findall(r",\s*(\w+)\s*=", value))):
            raise UsageError(
                f"{flag}={name}={value:.60} has a second argument, {min(more)}; give each its own {flag}=NAME=VALUE, "
                "in Python one dictionary"
            )
        arguments[name] = coerce_argument(flag, name, value, entry.defaults.get(name))
        if fault := outside(entry.intervals, name, arguments[name]):
            raise UsageError(f"{flag} {fault}; give {entry.name} one that is")
    if missing := [name for name in entry.required if name not in arguments]:
        raise UsageError(f"{entry.name} needs {flag} {missing[0]}=VALUE")
    return arguments


def coerce_argument(flag: str, name: str, value: Any, default: Any) -> Any:
    """Converts a value to the type of its default; without a plain default it stays as it is. Raises `UsageError`.

    Text of a command line or of YAML has a number, list or word guessed where the default has no type.
    """
    try:
        if isinstance(default, (tuple, list)):
            kind = type(default[0]) if default else None
            return tuple(_coerce(kind, item) for item in _items(value))
        is_list = isinstance(value, UntypedText) and ("," in value or _BRACKETS.fullmatch(value) is not None)
        if type(default) not in _TYPES and (type(value) is list or is_list):
            return tuple(_coerce(None, item) for item in _items(value))
        return _coerce(type(default), value)
    except ValueError:
        name_of_kind = {bool: "a boolean", int: "an integer", float: "a number", str: "text"}
        shown = default
        if default and isinstance(default, (tuple, list)):
            shown = f"{','.join(map(str, default))} (in Python {tuple(default)})"
        hint = f"give a value like the default, {shown}" if shown or shown == 0 else "give one or more, or leave it out"
        expected = name_of_kind.get(type(default), "such a list")
        raise UsageError(f"{flag} {name}={value!s:.60} is not {expected}; {hint}") from None


def _items(value: Any) -> Sequence[Any]:
    """Splits a list into items; text at its commas, maybe within brackets. Raises ValueError for an empty one."""
    if not isinstance(value, str):
        if not isinstance(value, (list, tuple)) and getattr(value, "ndim", None) != 1:
            value = [value]
        if not len(value):
            raise ValueError("there is none")
        return value
    items = [UntypedText(item.strip()) for item in _BRACKETS.sub(r"\1\2", value).split(",")]
    if not all(items):
        raise ValueError("an item is empty")
    return items


_TYPES: dict[Any, Any] = {bool: Integral, int: Integral, float: Real, str: str}  # that each accepts
_NOT_FINITE = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}  # as a run's configuration has them


def _coerce(kind: type | None, value: Any) -> Any:
    """Converts a value to a plain type, text of no type by its looks; else it stays as it is. Raises ValueError."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a scalar of NumPy's
        value = value.item()
    if kind is str and isinstance(value, (Real, os.PathLike)) and not isinstance(value, bool):
        return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    if kind is bool and isinstance(value, str):
        return boolean(value)
    if kind in (int, float) and isinstance(value, str):
        return number(value.strip(), kind is int)
    if kind and kind in _TYPES:
        is_other = isinstance(value, bool) and kind is not bool
        if is_other or not isinstance(value, _TYPES[kind]) or (kind is bool and value not in (0, 1)):
            raise ValueError(f"{value} is of another type")
        return kind(value)
    if not isinstance(value, UntypedText):
        return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
    return guessed(value.strip())


def _arguments(parameters: Collection[inspect.Parameter]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Splits parameters into (defaults by name, names of those without one)."""
    return (
        {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty},
        tuple(parameter.name for parameter in parameters if parameter.default is parameter.empty),
    )


def _summary(documented) -> str:
    return (documented.__doc__ or "").strip().split("\n")[0]
