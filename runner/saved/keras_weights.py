"""Loads weights from a file that Keras wrote, `.keras` or `.weights.h5`."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import zipfile

import h5py
import keras

from ...engine.errors import CheckpointError, reason
from ...engine.machine import files

_LISTED = 8
# Of Keras's message: a variable's values, and the list of the objects that it has counted before.
_LEFT_OUT = re.compile(r" Target variable: .*| List of objects that .*")


def load_keras_weights(path: str, model: keras.Model) -> int:
    """Loads a Keras file's weights into a model, and nothing else of the file.

    Layers are matched as Keras matches them: by their kind and position in the model, whatever their names.

    Returns:
      How many weights were loaded: variables, moving statistics too.

    Raises:
      CheckpointError: the file can't be read, or it and the model do not have the same layers of the same shapes.
    """
    file_layers = _read_layers(path)
    with tempfile.TemporaryDirectory() as folder, files.naming(folder):
        # A file written by this model shows where each of its layers is in such a file.
        model_path = os.path.join(folder, "model.weights.h5")
        model.save_weights(model_path)
        model_layers = _read_layers(model_path)
    fix = "build the model that it is of, or take single layers from it in build_model"
    try:
        model.load_weights(path)
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        problem = re.sub(_LEFT_OUT, "", " ".join(str(error).split()))
        raise CheckpointError(f"{path} does not fit model {model.name}: {problem}; {fix}") from error
    # Keras does not look for these.
    if extra := [name for position, (name, _) in file_layers.items() if position not in model_layers]:
        more = f" and {len(extra) - _LISTED} more" if len(extra) > _LISTED else ""
        raise CheckpointError(
            f"{path} does not fit model {model.name}: only the file has {', '.join(extra[:_LISTED])}{more}; {fix}"
        )
    return sum(count for _, count in model_layers.values())


def _read_layers(path: str) -> dict[str, tuple[str, int]]:
    """Reads the layers of a file that have weights, nested ones too, by position: name, and number of weights.

    Reads the file itself, since `keras.saving.KerasFileEditor` (Keras 3.15) does not see the layers of a nested model.
    """
    layers = {}

    def refuse_other_files(group: h5py.Group) -> None:
        """Raises ValueError where what is in the group is elsewhere, as an older Keras would follow (CVE-2026-1669)."""
        for name in group:
            part = group.get(name, getlink=True)
            dataset = None if isinstance(part, h5py.ExternalLink) else group[name]
            if dataset is None or (isinstance(dataset, h5py.Dataset) and (dataset.external or dataset.is_virtual)):
                raise ValueError(f"{group.name.rstrip('/')}/{name} has its values in another file")

    def visit(group_path: str, part) -> None:
        if isinstance(part, h5py.Group):
            refuse_other_files(part)
        position, _, last = group_path.rpartition("/")
        is_layer = last == "vars" and isinstance(part, h5py.Group) and len(part)
        if is_layer and position.partition("/")[0] != "optimizer":
            layers[position] = (str(part.attrs.get("name", position)), len(part))

    try:
        with contextlib.ExitStack() as stack:
            if path.endswith(".keras"):
                archive = stack.enter_context(zipfile.ZipFile(path))
                file = h5py.File(stack.enter_context(archive.open("model.weights.h5")))
            else:
                file = h5py.File(path)
            refuse_other_files(stack.enter_context(file))
            file.visititems(visit)
    except (OSError, KeyError, ValueError, RuntimeError, zipfile.BadZipFile) as error:  # h5py's are of any of these
        raise CheckpointError(f"{path} can't be read as a file of Keras's weights: {reason(error)}") from error
    return layers
