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
_DEEPEST = 200  # groups around a layer: a model of models has four for each
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
    layers, seen = dict[str, tuple[str, int]](), set[int]()

    def visit(group: h5py.Group, path: str, depth: int) -> None:
        """Visits what is in a group. Raises ValueError where an older Keras would read another file (CVE-2026-1669)."""
        seen.add(h5py.h5o.get_info(group.id).addr)
        position, _, last = path.rpartition("/")
        if last == "vars" and len(group) and position.partition("/")[0] != "optimizer":
            layers[position] = (str(group.attrs.get("name", position)), len(group))
        for name in group:
            inner = f"{path}/{name}".lstrip("/")
            link = group.get(name, getlink=True)
            part = None if isinstance(link, h5py.ExternalLink) else group[name]
            if part is None or (isinstance(part, h5py.Dataset) and (part.external or part.is_virtual)):
                raise ValueError(f"/{inner} has its values in another file")
            if isinstance(part, h5py.Group) and h5py.h5o.get_info(part.id).addr not in seen:
                if depth == _DEEPEST:
                    raise ValueError(f"its groups are nested more than {_DEEPEST} deep")
                visit(part, inner, depth + 1)

    try:
        with contextlib.ExitStack() as stack:
            if path.endswith(".keras"):
                archive = stack.enter_context(zipfile.ZipFile(path))
                file = h5py.File(stack.enter_context(archive.open("model.weights.h5")))
            else:
                file = h5py.File(path)
            visit(stack.enter_context(file), "", 0)
    except (OSError, KeyError, ValueError, RuntimeError, zipfile.BadZipFile) as error:  # h5py's are of any of these
        raise CheckpointError(f"{path} can't be read as a file of Keras's weights: {reason(error)}") from error
    return layers
