"""Properties of the data, as stored in runs, exported models and prepared shards."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..engine.data.preprocessing import KINDS, UNCHANGED, ColumnPreprocessing, Preprocessing
from ..engine.data.run_data import Data
from .files import tokens

_NAMES = [field.name for field in dataclasses.fields(Data)][2:]
_TYPES: dict[str, Any] = {
    "num_classes": int,
    "ids": (int, str),
    "columns": str,
    **dict.fromkeys(("vocabulary", "tokens", "preprocessing", "class_weight", "batch_sizes", "flags"), dict),
}


def as_json(data: Data) -> dict[str, Any]:
    """Returns the properties of data, plain JSON, for `from_json`."""
    saved: dict[str, Any] = {name: value for name in _NAMES if (value := getattr(data, name)) is not None}
    if data.tokens is not None:
        saved["tokens"] = data.tokens.to_saved()
    del saved["preprocessing"]
    if data.preprocessing != UNCHANGED:
        columns = {
            name: {**column._asdict(), "words": [*map(as_text, column.words)]}
            for name, column in data.preprocessing.columns.items()
        }
        for column in columns.values():  # like what earlier versions wrote, unless ids are numbered
            if values := column.pop("values"):
                column["values"] = numbers_as_text(np.frombuffer(values, np.int64))
        saved["preprocessing"] = {"columns": columns, "array": data.preprocessing.array}
    return json.loads(json.dumps(saved, default=lambda value: value.item()))  # including NumPy's numbers


def from_json(content: Mapping[str, Any], path: str) -> Data:
    """Restores data without examples from the properties in the file at `path`; ignores other keys.

    Raises:
      KeyError, TypeError: the argument was not made by `as_json`.
    """
    restored = {name: content[name] for name in _NAMES if content.get(name) is not None}
    for name, value in restored.items():
        if not isinstance(value, _TYPES.get(name, object)):
            raise TypeError(f"{name} is {value!r:.40}, which is of another type")
    if wrong := [count for count in restored.get("vocabulary", {}).values() if not isinstance(count, int)]:
        raise TypeError(f"vocabulary has {wrong[0]!r:.40}, which is not a number of ids")
    if "tokens" in restored:
        restored["tokens"] = tokens.from_saved(restored["tokens"], path)
    if "classes" in restored:
        restored["classes"] = tuple(map(_text, restored["classes"]))
    if "preprocessing" in restored:
        restored["preprocessing"] = _preprocessing(**restored["preprocessing"])
    return Data(None, **restored)


def _preprocessing(columns: Mapping[str, Mapping[str, Any]], array: Iterable[str]) -> Preprocessing:
    restored = {}
    for name, saved in {**columns}.items():
        column = ColumnPreprocessing(**saved)
        if column.kind not in KINDS:
            raise TypeError(f"{column.kind!r:.40} is not one of {', '.join(KINDS)}")
        np.asarray(column.fill, np.float64)
        words, places = tuple(map(as_bytes, column.words)), tuple(column.places)
        values = numbers_from_text(column.values or "").tobytes()
        restored[name] = column._replace(places=places, words=words, values=values)
    return Preprocessing(restored, tuple(map(_text, array)))


def numbering_digest(classes: Iterable[str]) -> int:
    """Returns a digest that identifies a numbering of classes."""
    return int.from_bytes(hashlib.sha256(as_bytes("\0".join(classes))).digest()[:4], "big")


def as_text(word: bytes) -> str:
    """Converts a word to text for JSON, reversibly for any bytes, as for files' names."""
    return word.decode(errors="surrogateescape")


def as_bytes(word: Any) -> bytes:
    """Reverts `as_text`. Raises TypeError if it is not text."""
    return _text(word).encode(errors="surrogateescape")


def numbers_as_text(numbers: np.ndarray) -> str:
    """Writes integers, of which there may be millions, as one text."""
    return " ".join(map(str, numbers.tolist()))


def numbers_from_text(text: Any) -> np.ndarray:
    """Reverts `numbers_as_text`, int64. Raises TypeError if it is not such text."""
    try:
        return np.array([*map(int, _text(text).split())], np.int64)
    except (ValueError, OverflowError):
        raise TypeError(f"expected integers, found {text!r:.40}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r:.40}")
    return value
