"""Loads weights from a file that Keras wrote, `.keras` or `.weights.h5`. Host code."""

from __future__ import annotations

import contextlib
import os
import tempfile
import zipfile

import h5py
import keras

from ....engine.errors import CheckpointError, reason
from ....engine.machine import files

_LISTED = 8


def load_keras_weights(path: str, model: keras.Model) -> int:
    """Loads a Keras file's weights into a model, and nothing else of the file.

    Layers are matched as Keras matches them: by their kind and position in the model, whatever their names.

    Returns:
      How many weights were loaded: variables, moving statistics too.

    Raises:
      CheckpointError: before any weight is changed, for a file that can't be read, and where it and the model do not
        have the same layers of the same shapes.
    """
    theirs = _read(path)
    with tempfile.TemporaryDirectory() as folder, files.naming(folder):
        # A file written by this model shows where each of its layers is in such a file.
        own = os.path.join(folder, "model.weights.h5")
        model.save_weights(own)
        ours = _read(own)
    layer_paths = [*ours, *(layer_path for layer_path in theirs if layer_path not in ours)]
    wrong = [_difference(ours.get(layer_path), theirs.get(layer_path)) for layer_path in layer_paths]
    if wrong := [line for line in wrong if line]:
        more = f"; and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise CheckpointError(
            f"{path} does not fit model {model.name}: {'; '.join(wrong[:_LISTED])}{more}; build the model that it is "
            "of, or take single layers from it in build_model"
        )
    model.load_weights(path)
    return sum(len(shapes) for _, shapes in ours.values())


def _difference(here, there) -> str | None:
    """Describes how two layers, (name, shapes) of the model and of the file, differ; None if they do not."""
    if there is None:
        return f"{here[0]} is not in the file"
    if here is None:
        return f"{there[0]} is only in the file"
    if here[1] != there[1]:
        return f"{here[0]} has {_written(here[1])} here and {_written(there[1])} in the file"
    return None


def _written(shapes: list) -> str:
    return " ".join(str(list(shape)) for shape in shapes)


def _read(path: str) -> dict[str, tuple[str, list]]:
    """Reads the layers of a file that have weights, nested ones too, by position: (name, shapes).

    Reads the file itself, since `keras.saving.KerasFileEditor` (Keras 3.15) does not see the layers of a nested model.
    """
    layers = {}

    def take(layer_path: str, part) -> None:
        layer_path, _, last = layer_path.rpartition("/")
        if (
            last == "vars"
            and isinstance(part, h5py.Group)
            and len(part)
            and layer_path.partition("/")[0] != "optimizer"
        ):
            shapes = [part[key].shape for key in sorted(part, key=_number)]
            layers[layer_path] = (str(part.attrs.get("name", layer_path)), shapes)

    try:
        with contextlib.ExitStack() as stack:
            if path.endswith(".keras"):
                archive = stack.enter_context(zipfile.ZipFile(path))
                file = h5py.File(stack.enter_context(archive.open("model.weights.h5")))
            else:
                file = h5py.File(path)
            stack.enter_context(file).visititems(take)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} can't be read as a file of Keras's weights: {reason(error)}") from error
    return layers


def _number(key: str):
    return (0, int(key)) if key.isdecimal() else (1, key)
