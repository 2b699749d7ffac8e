"""Features of shards' records: from a features.json beside them, from arguments, or inferred.

A features.json has `features` (name -> shape, dtype and storage: bytes, float or int64); `label` and `weight`, or
`example`, an example's form as a nest of names; `"records": "raw"` if a record is the bytes of its one feature instead
of an Example; properties of the data (`input.data_json`); and the `splits` that `crankshaft prepare` has written. Host
code, NumPy only; TensorFlow infers features without a features.json.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...engine import logging
from ...engine.data.source import Spec
from ..checks import InputError
from ..files.storage import Files, is_remote, read_remote
from . import tfds

NAME = "features.json"
STORED = ("bytes", "float", "int64")
_MOST_VALUES = 1 << 31  # a record has fewer bytes
_CURE = "see docs/files.md for its contents"


@dataclasses.dataclass(frozen=True)
class RecordFeature:
    """A feature of each record.

    Attributes:
      stored: "bytes" (a number's bytes in memory, little-endian; for text, each string), "float" or "int64".
      spec: shape and dtype of the feature in an example.
    """

    name: str
    stored: str
    spec: Spec

    @property
    def is_text(self) -> bool:
        return self.spec.dtype.hasobject

    @property
    def values(self) -> int:
        """Number of its values in an example."""
        return self.spec.size

    @property
    def size(self) -> int:
        """Size in bytes if stored as bytes, else the number of values."""
        return self.spec.nbytes if self.stored == "bytes" else self.values

    def as_json(self) -> dict[str, Any]:
        dtype = "string" if self.is_text else self.spec.dtype.name
        return {"shape": [*self.spec.shape], "dtype": dtype, "stored": self.stored}

    def __str__(self) -> str:
        return f"{self.name} {self.as_json()['dtype']} {[*self.spec.shape]}"


@dataclasses.dataclass(frozen=True)
class Features:
    """The features of records, and an example's form.

    Attributes:
      example: nest of tuples and dicts of their names.
      extra: properties of the data (`input.data_json`) and the splits.
    """

    by_name: dict[str, RecordFeature]
    example: Any
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def raw(self) -> bool:
        """Whether a record is the bytes of its one feature instead of a tf.train.Example."""
        return self.extra.get("records") == "raw"

    @property
    def element_spec(self) -> Any:
        return nested(self.example, lambda name: self.by_name[name].spec)

    def as_json(self) -> dict[str, Any]:
        described = {name: feature.as_json() for name, feature in self.by_name.items()}
        return {"features": described, "example": self.example, **self.extra}


def nested(example: Any, convert: Callable[[str], Any]) -> Any:
    """Returns a nest of names with each name replaced."""
    if isinstance(example, dict):
        return {key: nested(value, convert) for key, value in example.items()}
    if isinstance(example, (tuple, list)):
        return tuple(nested(value, convert) for value in example)
    return convert(example)


def names_in(example: Any) -> list[str]:
    """Lists the names in a nest."""
    texts: list[str] = []
    nested(example, texts.append)
    return texts


def find(paths: list[str], texts: tuple[str, ...], label: str, weight: str, samples: Callable[[], list[bytes]]):
    """Returns the features of shards: from arguments, from a features.json, or inferred.

    Args:
      texts: arguments NAME:DTYPE:SHAPE, e.g. "image:uint8:28x28x1", "label:int64".
      label: name of the labels; "" is features.json's, else "label" if present.
      weight: name of the weights; "" is features.json's, else none.

    Raises:
      InputError: the features can't be used.
    """
    path, content = read_json(paths)
    if content is not None and not texts:
        return _from_json(path, content, label, weight)
    by_name, rare = _infer_features(paths[0], samples())
    if texts:
        features = [_parse_declared(text, by_name) for text in texts]
    else:
        features = [feature for name, feature in by_name.items() if name not in rare]
        if rare:
            logging.warning(
                "left out, as less than half of the records that were looked at have it: %s; if it is to be read, name "
                "all that is by input_arg=features=...",
                ", ".join(f"{name} ({count})" for name, count in rare.items()),
            )
        logging.warning(
            "features as the records look: %s; write a %s beside the files, or input_arg=features=..., if they are "
            "something else",
            ", ".join(map(str, features)),
            NAME,
        )
    by_name = {feature.name: feature for feature in features}
    return Features(by_name, _example([*by_name], label, weight, "the records"))


def read_json(paths: list[str]) -> tuple[str, dict | None]:
    """Returns (path, content) of the features.json beside the first file, or one folder up; without one, None.

    Raises:
      InputError: it is not JSON, or can't be read.
    """
    folder = os.path.dirname(paths[0])
    for searched in (folder, os.path.dirname(folder) if folder else os.pardir):
        path = f"{searched}/{NAME}" if searched else NAME
        if not (read_remote(path, "exists") if is_remote(path) else os.path.exists(path)):
            continue
        try:
            content = json.loads(Files([path]).read(0))
            json.dumps(content, ensure_ascii=False).encode()  # half a character, which JSON can escape, is no name
        except UnicodeDecodeError:
            raise InputError(f"{path} is not text; {_CURE}") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is not JSON ({error}); mend it") from None
        if tfds.is_tfds(content):
            return path, content
        if not isinstance(content, dict) or not isinstance(content.get("features"), dict) or not content["features"]:
            raise InputError(f"{path} has no mapping `features`; {_CURE}")
        return path, content
    return "", None


def _from_json(path: str, content: dict, label: str, weight: str) -> Features:
    if tfds.is_tfds(content):
        content = tfds.convert_features(path, content)
    by_name = {}
    for name, entry in content["features"].items():
        if not isinstance(entry, dict):
            raise InputError(f"{path}: {name} is {entry!r:.40}; give its shape, dtype and storage")
        dtype = _dtype(f"{path}: {name}", entry.get("dtype", ""))
        shape = entry.get("shape", [])
        if (
            not isinstance(shape, list)
            or not all(isinstance(size, int) and 0 <= size < _MOST_VALUES for size in shape)
            or math.prod(shape) >= _MOST_VALUES
        ):
            raise InputError(f"{path}: {name} has shape {shape!r:.40}; give a list of sizes, e.g. [28, 28, 1]")
        default = "float" if dtype == np.float32 else "int64" if dtype == np.int64 else "bytes"
        stored = entry.get("stored", default)
        if stored not in STORED or (dtype.hasobject and stored != "bytes"):
            raise InputError(f"{path}: {name} is stored as {stored!r:.40}; use bytes, float or int64 (text: bytes)")
        by_name[name] = RecordFeature(name, stored, Spec(tuple(shape), dtype))
    if "example" not in content or label or weight:
        example = _example([*by_name], label or content.get("label", ""), weight or content.get("weight", ""), path)
    else:
        example = content["example"]
        if strange := [name for name in names_in(example) if name not in by_name]:
            raise InputError(f"{path}: its example has {strange[0]!r}, which is none of {', '.join(by_name)}; mend it")
    used = {name: by_name[name] for name in names_in(example)}
    extra = {key: value for key, value in content.items() if key not in ("features", "example", "label", "weight")}
    if extra.get("records") == "raw" and (len(used) > 1 or next(iter(used.values())).stored != "bytes"):
        raise InputError(f"{path}: raw records are the bytes of one feature, and it names {', '.join(used)}; mend it")
    return Features(used, example, extra)


def _dtype(source: str, name: Any) -> np.dtype:
    if name == "string":
        return np.dtype(object)
    try:
        dtype = np.dtype(name) if isinstance(name, str) and name else None
    except TypeError:
        dtype = None
    if dtype is None or dtype.kind not in "biuf":
        raise InputError(f"{source} is of dtype {name!r:.40}; use one such as uint8, int64, float32 or string")
    return dtype


def _example(names: list[str], label: str, weight: str, source: str) -> Any:
    """Returns the form of an example: (features, label, weight), without missing components."""
    for flag, name in (("label", label), ("weight", weight)):
        if name and name not in names:
            raise InputError(f"{flag}={name} is none of the features of {source}: {', '.join(names)}; use one of them")
    label = label or ("label" if "label" in names else "")
    rest = [name for name in names if name not in (label, weight)]
    if not rest:
        raise InputError(f"{source}: there is no feature besides {label or weight}; name the others too")
    features: Any = rest[0] if len(rest) == 1 else {name: name for name in rest}
    if weight:
        return (features, label or (), weight)
    return (features, label) if label else (features,)


def _parse_declared(text: str, by_name: Mapping[str, RecordFeature]) -> RecordFeature:
    match = re.fullmatch(r"([^:]+)(?::(\w+))?(?::(\d+(?:x\d+)*))?", text)
    if not match:
        raise InputError(f"features={text} can't be read; write NAME:DTYPE:SHAPE, e.g. image:uint8:28x28x1")
    name, dtype, shape = match.groups()
    if name not in by_name:
        raise InputError(f"features={text}: no record that was looked at has {name}; they have {', '.join(by_name)}")
    seen = by_name[name]
    spec_dtype = _dtype(f"features={text}", dtype) if dtype else seen.spec.dtype
    sizes = tuple(map(int, shape.split("x"))) if shape else seen.spec.shape if spec_dtype == seen.spec.dtype else ()
    return RecordFeature(name, seen.stored, Spec(sizes, spec_dtype))


def _infer_features(path: str, samples: list[bytes]) -> tuple[dict[str, RecordFeature], dict[str, str]]:
    """Infers features from sample records.

    Each feature is that of most samples that have values for it. Bytes of one length that are not text are uint8, else
    strings.

    Returns:
      All samples' features, by name; and how many samples have each of the rare ones: "3 of 64".
    """
    try:
        parsed = [values_in(record) for record in samples]
    except NotAnExampleError as error:
        raise InputError(f"{path}: of a record: {error}; write a {NAME}, or tf.train.Examples") from None
    by_name, rare = {}, {}
    for name in sorted({name for record in parsed for name in record}):
        stored = [record[name] for record in parsed if name in record and len(record[name].values)]
        kinds = collections.Counter((feature.kind, len(feature.values)) for feature in stored)
        if 2 * kinds.total() < len(samples):
            rare[name] = f"{kinds.total()} of {len(samples)}"
        if kinds:
            kind, count = kinds.most_common(1)[0][0]
            values = [value for feature in stored if feature.kind == kind for value in feature.values]
            by_name[name] = _infer_feature(name, kind, count, values)
    if len(rare) == len({*by_name, *rare}):
        raise InputError(f"{path}: no feature is in half of its records; write a {NAME}, or records that have the same")
    return by_name, rare


class NotAnExampleError(ValueError):
    """Bytes are not a serialized tf.train.Example, of the form "it is ..."."""


class Stored(NamedTuple):
    """A feature of a record: one of `STORED`, and its values."""

    kind: str
    values: Sequence[Any]


def values_in(record: bytes) -> dict[str, Stored]:
    """Returns the features of a serialized tf.train.Example by name. Raises `NotAnExampleError`."""
    import tensorflow as tf

    lists: Iterable[str] = ()
    try:
        lists = tf.train.SequenceExample.FromString(record).feature_lists.feature_list
        features = tf.train.Example.FromString(record).features.feature
    except Exception:  # protobuf's, which TensorFlow does not export
        features = {}
    if lists:  # which an Example's parser skips
        raise NotAnExampleError(f"it is a tf.train.SequenceExample, whose lists are not read ({', '.join(lists)})")
    if record and not features:
        raise NotAnExampleError("it is not a serialized tf.train.Example")
    kinds = {name: feature.WhichOneof("kind") for name, feature in features.items()}
    return {name: Stored(kind[:-5], getattr(features[name], kind).value) for name, kind in kinds.items() if kind}


def _infer_feature(name: str, kind: str, count: int, values: Sequence[Any]) -> RecordFeature:
    shape = () if count == 1 else (count,)
    if kind != "bytes":
        return RecordFeature(name, kind, Spec(shape, np.float32 if kind == "float" else np.int64))
    sizes = {len(value) for value in values}
    if count == 1 and len(sizes) == 1 and not all(_is_text(value) for value in values):
        return RecordFeature(name, kind, Spec((sizes.pop(),), np.uint8))
    return RecordFeature(name, kind, Spec(shape, object))


def _is_text(value: bytes) -> bool:
    try:
        return value.decode().isprintable()
    except UnicodeDecodeError:
        return False
