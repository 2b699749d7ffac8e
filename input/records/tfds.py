"""Reads the features.json that TFDS writes beside its shards, as a features.json of this project.

TFDS stores numbers as int64 or float lists, and text as bytes (`tensorflow_datasets/core/example_serializer.py`); the
JSON is that of `core/proto/feature.proto`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..checks import InputError
from ..files import listing
from ..files.storage import Files

_CURE = "name those to be read by input_arg=features=NAME:DTYPE:SHAPE,..., or write shards by crankshaft prepare"


def is_tfds(content: Any) -> bool:
    """Returns whether a features.json is TFDS's."""
    return isinstance(content, dict) and "pythonClassName" in content and "features" not in content


def convert_features(path: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Converts it to the form of `records.features`: features, num_classes and class names.

    Raises:
      InputError: a feature can't be read, such as an encoded image or a sequence.
    """
    described = content.get("featuresDict", {}).get("features")
    if not isinstance(described, dict) or not described:
        raise InputError(f"{path} is TFDS's, and describes no dict of features; {_CURE}")
    ours: dict[str, Any] = {"features": {}}
    for name, entry in described.items():
        kind = str(entry.get("pythonClassName", "")).rpartition(".")[2]
        if "classLabel" in entry:
            ours["features"][name] = {"shape": [], "dtype": "int64", "stored": "int64"}
            if name == "label":
                ours |= _classes(path, name, entry["classLabel"])
        elif "text" in entry:
            ours["features"][name] = {"shape": [], "dtype": "string", "stored": "bytes"}
        elif "tensor" in entry:
            ours["features"][name] = _tensor(path, name, entry["tensor"])
        else:
            raise InputError(f"{path}: {name} is {kind or 'of no kind'} of TFDS's, which is not read; {_CURE}")
    return ours


def _tensor(path: str, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    dtype, encoding = str(entry.get("dtype", "")), entry.get("encoding", "none")
    sizes = [int(size) for size in entry.get("shape", {}).get("dimensions", [])]
    if min(sizes, default=0) < 0 or encoding not in ("none", "bytes"):
        fault = "of no fixed shape" if encoding in ("none", "bytes") else f"encoded as {encoding}"
        raise InputError(f"{path}: {name} is {fault}, which is not read; {_CURE}")
    is_bytes = dtype == "string" or encoding == "bytes"
    stored = "bytes" if is_bytes else "float" if "float" in dtype else "int64"
    return {"shape": sizes, "dtype": dtype, "stored": stored}


def _classes(path: str, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    count = int(entry.get("numClasses", 0))
    names = listing.join(os.path.dirname(path), f"{name}.labels.txt")
    if not listing.exists(names):
        return {"num_classes": count} if count else {}
    classes = Files([names]).read(0).decode(errors="surrogateescape").splitlines()
    return {"num_classes": len(classes), "classes": classes}
