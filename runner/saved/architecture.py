"""The architecture of a run's models, as `RunDir.model` has it, and how it differs from that of a program."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from ...engine.internals import keras, keras_calls, variables
from ...engine.trainer import Trainer
from ..command_line.values import differences, short
from ..host import isolation

MODEL = "model"  # the attribute of the model that `Trainer.forward` computes, unless the trainer has another
_MOST_CHANGES = 5  # in a line
_NOT_SETTINGS = re.compile("trainable|.*seed")  # of a layer


class _Layer(NamedTuple):
    """A layer's class, settings by path, and what it is called with; `name` is empty if Keras has chosen it."""

    owner: str
    name: str
    kind: str
    settings: dict[str, Any]
    number: int
    inputs: str = ""

    def __str__(self) -> str:
        return f"{self.owner}{self.name or f'layer {self.number}'} ({self.kind})"

    @property
    def key(self) -> tuple[str, ...]:
        return self.owner, self.name, self.kind, json.dumps(self.settings, sort_keys=True)


def describe(trainer: Trainer) -> dict[str, Any]:
    """Describes a trainer's models by Keras's configurations, and its layers that these do not have. Plain JSON."""
    models = {path: _configuration(model) for path, model in keras_models(trainer).items()}
    layers = {
        path: _configurations(layer)
        for path, layer in trainer.inventory.layers.items()
        if not _has_graph(models.get(path))
    }
    model = models.pop(MODEL, None)
    return {"keras": model, **({"models": models} if models else {}), "layers": layers}


def keras_models(trainer: Trainer) -> dict[str, tf.keras.Model]:
    """Returns the Keras models among a trainer's attributes, by their names."""
    return variables.tracked(trainer, keras_calls.Trainable)


def changes(before: Mapping[str, Any], trainer: Trainer) -> str:
    """Describes how a trainer's layers differ from those of a run: classes, settings, order and what calls what.

    Only the order in which a subclassed model makes its layers counts, not its `call`; of functions, their names.

    Args:
      before: the run's description; an earlier version's lacks the layers of subclassed models.
    """
    now = describe(trainer)
    parts = [_parts(before), _parts(now if "layers" in before else {**now, "layers": {}})]
    try:
        if _layers(parts[0]) == _layers(parts[1]):
            return ""
    except (AttributeError, KeyError, TypeError):
        return "its layers can't be read"
    # Another version of Keras may have written the same in other words.
    with isolation.Isolation().entered(), tf.Graph().as_default():
        todays = [{path: [*map(_as_todays, part)] for path, part in side.items()} for side in parts]
    if any(None in part for side in todays for part in side.values()):
        old, new = map(_layers, parts)
        old, new = _with_common_settings(old, new), _with_common_settings(new, old)
    else:
        old, new = map(_layers, todays)
    lines = _layer_changes(old, new) or [
        f"inputs of {one}: {short(other.inputs)} -> {short(one.inputs)}"
        for other, one in zip(old, new, strict=True)
        if other.inputs != one.inputs
    ]
    more = len(lines) - _MOST_CHANGES
    return "; ".join([*lines[:_MOST_CHANGES], *([f"{more} more"] if more > 0 else [])])


def _configuration(layer: tf.keras.layers.Layer) -> dict[str, Any] | None:
    """Describes a layer by Keras's configuration; None of one that has none."""
    try:
        configuration = json.loads(json.dumps(tf.keras.layers.serialize(layer)))
    except Exception:  # of any class, from a `get_config` of the user's
        return None
    configuration.pop("compile_config", None)  # weights are loaded, and no optimizer's state
    return configuration


def _configurations(layer: tf.keras.layers.Layer) -> list[dict[str, Any]]:
    """Describes a layer and the layers in it that no configuration before has."""
    found, inner = list[dict[str, Any]](), set[int]()
    for one in keras.layers_in(layer):
        if id(one) not in inner:
            found.append(_configuration(one) or {"class_name": type(one).__name__, "config": {"name": one.name}})
            inner |= {id(x) for x in keras.layers_in(one, itself=False)} if _has_graph(found[-1]) else set()
    return found


def _has_graph(configuration: Any) -> bool:
    """Returns whether a configuration has the model's layers."""
    return bool(configuration) and isinstance(configuration.get("config", {}).get("layers"), list)


def _parts(content: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Lists the configurations of a description's models and layers by the path of the trainer's attribute."""
    models = {**content.get("models", {}), MODEL: content["keras"]}
    return {path: [model] for path, model in models.items() if _has_graph(model)} | content.get("layers", {})


def _as_todays(configuration: dict[str, Any]) -> Any:
    """Returns a configuration as this version of Keras writes it; None of one that it can't read."""
    try:
        return _configuration(tf.keras.layers.deserialize(configuration))
    except Exception:  # of any class, from a user's constructor
        return None


def _layers(parts: Mapping[str, list[dict[str, Any]]]) -> list[_Layer]:
    found = list[_Layer]()
    for path, configurations in sorted(parts.items()):
        for number, configuration in enumerate(configurations, 1):
            found += _flattened(configuration, "" if path == MODEL else f"{path}/", number)
    return found


def _flattened(configuration: dict[str, Any], owner: str, number: int, inputs: str = "") -> Iterator[_Layer]:
    """Lists a layer and, after it, the layers in its graph."""
    kind, config, name = configuration["class_name"], configuration["config"], _name(configuration)
    is_automatic = re.sub(r"(_\d+)?$|_", "", name) in (kind.replace("_", "").lower(), "kerastensor")
    layer = _Layer(owner, "" if is_automatic else name, kind, {}, number, inputs)
    if not _has_graph(configuration):
        layer.settings.update((path, value) for path, value in _settings(config) if path != "name")
        yield layer
        return
    labels = dict[str, str]()
    for place, inner in enumerate(config["layers"], 1):
        first = next(_flattened(inner, "", place))
        labels[_name(inner)] = first.name or f"layer {place}"
    ends = [_linked(config.get(end, []), labels) for end in ("input_layers", "output_layers")]
    yield layer._replace(inputs=" -> ".join([inputs, *map(json.dumps, ends)]))
    for place, inner in enumerate(config["layers"], 1):
        calls = json.dumps(_linked(inner.get("inbound_nodes", []), labels))
        yield from _flattened(inner, f"{owner}{layer.name or f'layer {number}'}/" if inputs else owner, place, calls)


def _name(configuration: dict[str, Any]) -> str:
    """Returns a layer's name: of one without a `get_config` only its entry in a graph has it."""
    return configuration["config"].get("name") or configuration.get("name", "")


def _linked(value: Any, labels: Mapping[str, str]) -> Any:
    """Replaces the layers' names in what a layer is called with by labels that do not depend on automatic names."""
    if isinstance(value, dict) and value.get("class_name") == "__keras_tensor__":
        value = value["config"]["keras_history"]
    if isinstance(value, dict):
        return {key: _linked(inner, labels) for key, inner in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) == 3 and isinstance(value[0], str) and value[0] in labels:
        return ":".join([labels[value[0]], *(str(index) for index in value[1:] if index)])
    return [_linked(inner, labels) for inner in value]


def _settings(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Lists (path, value) of a configuration's values; of objects their classes, of functions their names."""
    if not isinstance(value, dict):
        yield path, value
        return
    if "class_name" in value:
        kind, value = value["class_name"], value.get("config")
        yield path, value if kind == "function" else kind
        if kind in ("function", "__lambda__", "SeedGenerator") or not isinstance(value, dict):
            return
        if len(value) > 1:  # a wrapped layer's name derives from the wrapper's; that of a dtype policy is its setting
            value = {key: inner for key, inner in value.items() if key != "name"}
    for key, inner in value.items():
        if not _NOT_SETTINGS.fullmatch(key):
            yield from _settings(inner, f"{path}.{key}" if path else key)


def _with_common_settings(layers: list[_Layer], others: list[_Layer]) -> list[_Layer]:
    """Removes the settings that no layer of the same class has among the others."""
    common: dict[str, set[str]] = {}
    for other in others:
        common.setdefault(other.kind, set()).update(other.settings)
    kept = [{name: x for name, x in one.settings.items() if name in common.get(one.kind, {name})} for one in layers]
    return [one._replace(settings=settings) for one, settings in zip(layers, kept, strict=True)]


def _layer_changes(old: list[_Layer], new: list[_Layer]) -> list[str]:
    lines, removed, added = list[str](), dict[tuple, _Layer](), dict[tuple, _Layer]()
    before, now = ([layer.key for layer in side] for side in (old, new))
    for operation, i, j, k, m in difflib.SequenceMatcher(None, before, now, autojunk=False).get_opcodes():
        if operation == "replace" and j - i == m - k:
            for other, one in zip(old[i:j], new[k:m], strict=True):
                values = [{"name": layer.name or None, **layer.settings} for layer in (other, one)]
                is_same = (other.owner, other.kind) == (one.owner, one.kind)
                lines += [f"{one} {line}" for line in differences(*values)] if is_same else [f"{other} -> {one}"]
        elif operation != "equal":
            removed |= {layer.key: layer for layer in old[i:j]}
            added |= {layer.key: layer for layer in new[k:m]}
    for key, layer in added.items():
        lines.append(
            f"{layer}: layer {removed[key].number} -> layer {layer.number}" if key in removed else f"{layer} is new"
        )
    return lines + [f"{layer} is gone" for key, layer in removed.items() if key not in added]
