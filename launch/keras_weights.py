"""Weights out of a file that Keras wrote, `.keras` or `.weights.h5`. Host code."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import zipfile

import keras

from crankshaft.engine.checkpoints import CheckpointError
from crankshaft.engine.errors import reason

_LISTED = 8


def load_keras_weights(path: str, model: keras.Model) -> int:
    """Gives a model the weights that a Keras file has for it, and nothing else of the file.

    Layers are found as Keras finds them: by their kind and place in the model, whatever their names.

    Returns how many weights were taken: variables, moving statistics too. Raises CheckpointError, before any is
    changed, for a file that can't be read, and where it and the model do not have the same layers of the same shapes.
    """
    theirs = _read(path)
    with tempfile.TemporaryDirectory() as folder:
        # What this model would have written says which of its layers stands where in such a file.
        own = os.path.join(folder, "model.weights.h5")
        model.save_weights(own)
        ours = _read(own)
    places = [*ours, *(place for place in theirs if place not in ours)]
    wrong = [_difference(ours.get(place), theirs.get(place)) for place in places]
    if wrong := [line for line in wrong if line]:
        more = f"; and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise CheckpointError(
            f"{path} does not fit model {model.name}: {'; '.join(wrong[:_LISTED])}{more}; build the model that it is "
            "of, or take single layers from it in build_model"
        )
    model.load_weights(path)
    return sum(len(shapes) for _, shapes in ours.values())


def _difference(here, there) -> str | None:
    """How a layer of the model and that in its place of the file differ, (name, shapes) each; None if they do not."""
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
    """The layers of a file that have weights, by place: (name, shapes)."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it tells of itself
            editor = keras.saving.KerasFileEditor(path)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} can't be read as a file of Keras's weights: {reason(error)}") from error
    found = {}

    def walk(part: dict, place: str) -> None:
        if shapes := [part[key].shape for key in sorted(part, key=_number) if not isinstance(part[key], dict)]:
            about = editor.object_metadata.get(place, {})
            found[place] = (str(about.get("name", place.strip("/"))), shapes)
        for key, inside in part.items():
            if isinstance(inside, dict) and (place, key) != ("", "optimizer"):
                walk(inside, f"{place}/{key}")

    walk(editor.weights_dict, "")
    return found


def _number(key: str):
    return (0, int(key)) if key.isdecimal() else (1, key)
