"""Properties of the data, as stored in runs, exported models and prepared shards."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..engine.data.data import Data
from ..engine.data.preprocessing import ColumnPreprocessing
from .files import tokens

_NAMES = [field.name for field in dataclasses.fields(Data)][2:]
_PREPROCESSING = "treatments"  # its key in runs, exported models and prepared shards


def as_json(data: Data) -> dict[str, Any]:
    """Returns the properties of data, plain JSON, for `from_json`."""
    known: dict[str, Any] = {name: value for name in _NAMES if (value := getattr(data, name)) is not None}
    if data.tokens is not None:
        known["tokens"] = data.tokens.kept()
    if data.words is not None:
        known["words"] = {name: [as_text(word) for word in words] for name, words in data.words.items()}
    if data.preprocessing is not None:
        del known["preprocessing"]
        known[_PREPROCESSING] = {name: each._asdict() for name, each in data.preprocessing.items()}
    return json.loads(json.dumps(known, default=lambda value: value.item()))  # including NumPy's numbers


def from_json(content: Mapping[str, Any], path: str) -> Data:
    """Restores data without examples from the properties in the file at `path`; ignores other keys.

    Raises:
      KeyError, TypeError: the argument was not made by `as_json`.
    """
    known = {name: content[name] for name in _NAMES if content.get(name) is not None}
    if "tokens" in known:
        known["tokens"] = tokens.from_saved(known["tokens"], path)
    if "classes" in known:
        known["classes"] = tuple(map(_text, known["classes"]))
    if "array_columns" in known:
        known["array_columns"] = tuple(map(_text, known["array_columns"]))
    if "words" in known:
        known["words"] = {name: [*map(as_bytes, words)] for name, words in {**known["words"]}.items()}
    if (kept := content.get(_PREPROCESSING)) is not None:
        known["preprocessing"] = {name: ColumnPreprocessing(**each).checked() for name, each in {**kept}.items()}
    return Data(None, **known)


def order_of(trained_on: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Returns the columns of the array that a run was trained on, in order, or ()."""
    return tuple((trained_on or {}).get("array_columns", ()))


def ids_of(classes: Iterable[str]) -> int:
    """Returns a digest that identifies a numbering of classes."""
    return int.from_bytes(hashlib.sha256(as_bytes("\0".join(classes))).digest()[:4], "big")


def as_text(word: bytes) -> str:
    """Converts a word to text for JSON, reversibly for any bytes, as for files' names."""
    return word.decode(errors="surrogateescape")


def as_bytes(word: Any) -> bytes:
    """Reverts `as_text`. Raises TypeError if it is not text."""
    return _text(word).encode(errors="surrogateescape")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r:.40}")
    return value
