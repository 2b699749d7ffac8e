"""Fingerprints of a run's data, a few numbers that its checkpoints keep, and checks where they change.

They are kept in each manifest's `about`, under "data", by split; a checkpoint without them counts as one of this data.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine import logging
from ...engine.checkpoints import Manifest, RunDir
from ...engine.data.source import Split
from ...engine.data.streamed import Stream, untuned
from ...engine.internals import pipelines
from ...engine.internals.tensorflow import iterator_state
from ..command_line.config import Config
from ..command_line.values import differences
from ..failures import UsageError

# Read of an array: it takes milliseconds, whatever its size.
_MOST_EXAMPLES = 1024
_MOST_BYTES = 1 << 24
_SAMPLED = 16  # examples that workers compare
_SAMPLED_FLOATS = 256  # sampled per component
_ROUNDING = 1e-4  # between CPUs
_DIGITS = 6  # after the point
_NAMES = {"train": "training", "eval": "evaluation"}
_OTHER_IDS = "ids are numbered otherwise"


def fingerprint(split: Split, examples: int, ids: Any = None, eval_batches: int = 0) -> dict[str, int]:
    """Returns {"examples", "digest"} of a split, and "ids" if the data numbers its ids.

    For evaluation data also "eval_batches", if only its first batches are evaluated.

    The digest is of the shapes and types, and of arrays' contents in evenly spaced examples, among them the first and
    the last; of other data, of its identity.

    Args:
      ids: identifies the numbering of ids, a number or text; None if the data has none.
      eval_batches: number of batches in an evaluation; 0 is all.
    """
    digest = zlib.crc32(layout(split).encode())
    arrays = split.as_arrays()
    content = [split.identity().encode()] if arrays is None else map(_content, tf.nest.flatten(arrays))
    for chunk in content:
        digest = zlib.crc32(chunk, digest)
    numbers = {"examples": examples, "digest": digest}
    if ids is not None:
        numbers["ids"] = hash_ids(ids)
    if eval_batches:
        numbers["eval_batches"] = eval_batches
    return numbers


def hash_ids(ids: Any) -> int:
    """Returns the digest of a numbering of ids."""
    return zlib.crc32(repr(ids).encode())


def layout(split: Split) -> str:
    """Returns types and shapes of one example's components, as text."""
    # By the dtypes' names, which are the same whether a split has them from NumPy or from TensorFlow.
    described = tf.nest.map_structure(lambda spec: f"{spec.dtype.name} {[*spec.shape]}", split.element_spec)
    return json.dumps(described, sort_keys=True, default=str)


def _spaced(array, most: int) -> np.ndarray:
    """Spaces indices of examples evenly, among them the first and the last."""
    return np.linspace(0, len(array) - 1, min(most, len(array))).astype(np.int64)


def _content(array) -> bytes:
    most = max(2, min(_MOST_EXAMPLES, _MOST_BYTES * len(array) // max(1, array.nbytes)))
    examples = np.asarray(array[_spaced(array, most)])
    # An array of objects has their addresses as its bytes.
    return repr(examples.tolist()).encode() if examples.dtype.hasobject else np.ascontiguousarray(examples).tobytes()


def sample(split: Split) -> dict[str, Any]:
    """Returns some of a split's examples in plain JSON, to compare with other workers': see `differs`.

    Of arrays, some examples; of a dataset the first elements of each part whose order is the same at each reading.
    """
    arrays = split.as_arrays()
    if arrays is not None:
        return {"examples": [_sample(array[_spaced(array, _SAMPLED)]) for array in tf.nest.flatten(arrays)]}
    if not isinstance(split, Stream) or split.dataset is None:
        return {}
    found: dict[str, Any] = {"examples": [], "length": split.length, "shards": pipelines.shards(split.dataset)}
    if split.files_written:
        return found
    for part in pipelines.ordered(split.dataset):
        iterator = iter(untuned(part.take(_SAMPLED)))
        with contextlib.suppress(tf.errors.OpError):  # an op with a state, or a later error
            iterator_state(iterator)  # raises for it
            elements = [[x.numpy() for x in tf.nest.flatten(example, expand_composites=True)] for example in iterator]
            is_path = part is not split.dataset and [type(x) for x in elements[0]] == [bytes]
            found["examples"] += [_sample(os.path.basename(x) if is_path else x) for values in elements for x in values]
    return found


def kept_sample(split: Split) -> dict[str, Any]:
    """Returns the sample of a split that its checkpoints keep; of data that is not in memory, of its identity."""
    return {"identity": zlib.crc32(split.identity().encode())} if split.as_arrays() is None else sample(split)


def _sample(values: Any) -> Any:
    """Picks some floats of examples, or computes a digest of integers or text."""
    values = np.asarray(values)
    if np.issubdtype(values.dtype, np.floating) or values.dtype.name in ("bfloat16", "float8_e5m2", "float8_e4m3fn"):
        floats = np.ravel(values)[:: -(-values.size // _SAMPLED_FLOATS) or 1]
        return np.nan_to_num(floats.astype(np.float64).round(_DIGITS)).tolist()
    return zlib.crc32(repr(values.tolist()).encode())


def differs(one: Any, other: Any) -> bool:
    """Returns whether samples differ by more than another CPU's rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() != other.keys() or any(differs(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) != len(other) or any(map(differs, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return not math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
    return one != other


def check_resumed(config: Config, manifest: Manifest, about: dict[str, Any], is_complete: bool) -> None:
    """Compares a run's data with its checkpoint's, and warns with a line for each split that has changed.

    Args:
      about: the metadata to keep from now on.
      is_complete: whether the run would train no further, so that other data would not be trained on at all.

    Raises:
      UsageError: another number of examples to train on, ids that are numbered otherwise, or a complete run of other
        values, and --allow_changed_config is off.
    """
    changed = manifest.other_splits(about)
    if "train" in changed:
        changes = _differences(manifest, about, "train")
        if changes and not config.allow_changed_config:
            raise UsageError(
                f"run_dir={config.run_dir} is a run of other training data ({'; '.join(changes)}); use another "
                "run_dir, the same data, or allow_changed_config"
            )
        before, now = (data["data"]["train"] for data in (manifest.about, about))
        if is_complete and differs(before["sample"], now["sample"]) and not config.allow_changed_config:
            raise UsageError(
                f"run_dir={config.run_dir} is a complete run, of step {manifest.step:,}, of other training data, so "
                "nothing would be trained on this; use another run_dir, or allow_changed_config to get that run"
            )
        if config.is_chief:
            logging.warning("%s; if that is not meant, use another run_dir", _describe_change(manifest, about, "train"))
    for name in sorted(changed - {"train"}) if config.is_chief else ():
        logging.warning(
            "%s: it is evaluated again, and no score of before counts", _describe_change(manifest, about, name)
        )


def check_begun(config: Config, manifest: Manifest, ids: Any) -> None:
    """Raises `UsageError` where ids are numbered otherwise than for the checkpoint of --init_from: in other words.

    Args:
      ids: as `fingerprint` takes them.
    """
    before = manifest.about.get("data", {}).get("train")
    numbered = before.get("ids") if isinstance(before, dict) else None
    if config.allow_changed_config or ids is None or numbered in (None, hash_ids(ids)):
        return
    run_dir = os.path.dirname(os.path.dirname(manifest.prefix))
    tokens = config.input_entry and "tokenizer" in config.input_entry.defaults
    fix = f"input_arg=tokenizer={RunDir(run_dir).model} instead of vocabulary_size" if tokens else "that run's data"
    raise UsageError(
        f"init_from={config.init_from} was trained with other words, tokens or classes than this data has, so its "
        f"weights would mean others; use {fix}, or allow_changed_config to begin with them all the same"
    )


def check_division(config: Config, manifest: Manifest, about: dict[str, Any], num_replicas: int) -> None:
    """Raises `UsageError` where a stream is divided otherwise than the run began: other examples would come next."""
    if not (now := about.get("input", {}).get("train")) or config.allow_changed_config:
        return
    before = manifest.about.get("input", {}).get("train")
    if (members := (before or {}).get("members", {})) != now.get("members", {}):
        changes = differences(members, now.get("members", {}))
        raise UsageError(
            f"run_dir={config.run_dir} has other inputs per step ({'; '.join(changes)}); begin in another run_dir, or "
            "give allow_changed_config, and it continues with other examples"
        )
    if before is None and num_replicas > 1:
        division = "by an older rule"
    elif before is None or before == now or before.get("by") == now["by"] == "example":
        return
    else:
        division = _division(before)
    raise UsageError(
        f"run_dir={config.run_dir} divided its training data {division}, and this run divides it {_division(now)}: "
        "begin in another run_dir, run as many workers on the same files, or give allow_changed_config, and the epoch "
        "continues with other examples"
    )


def _division(part: dict[str, Any]) -> str:
    counts = part.get("counts", [])
    if part.get("by") == "file":
        return f"by files among {len(counts)} workers ({', '.join(f'{count:,}' for count in counts)} examples)"
    return "by the examples of a batch"


def check_evaluated(config: Config, manifest: Manifest, about: dict[str, Any]) -> None:
    """Raises `UsageError` where ids are numbered otherwise than for the checkpoint, and that was not allowed."""
    if _OTHER_IDS in _differences(manifest, about, "train") and not config.allow_changed_config:
        data_name = f"data_dir={config.data_dir}" if config.data_dir else "the training data"
        raise UsageError(
            f"{data_name} numbers ids otherwise than the training data of run_dir={config.run_dir} did, so that rows "
            "of its tables would mean others; use the run's own data, or allow_changed_config"
        )


def warn_of_other_data(config: Config, manifest: Manifest, about: dict[str, Any], has_ids: bool) -> None:
    """Warns if the training data has changed: where only its part for evaluation is read, and where ids may differ.

    Args:
      about: the metadata of the data that is read.
      has_ids: whether the model gets ids, whose numbering a script's data may not identify.
    """
    if "train" not in manifest.other_data(about) or not config.is_chief or config.reads_evaluation_alone:
        return
    is_ours = config.input_entry is not None and config.input_entry.path is None
    if has_ids and not is_ours and "ids" not in about["data"]["train"]:
        logging.warning("%s; if it numbers ids, they mean others now", _describe_change(manifest, about, "train"))
    if config.validation_split and config.input and not config.eval_data_dir and config.predict_split is None:
        part, rest = (about["data"][split]["examples"] for split in ("eval", "train"))
        logging.warning(
            "%s of %s examples are read: data_dir=%s is not the data of the run, and is divided by its "
            "validation_split=%s; to read all, set eval_data_dir instead",
            *(f"{part:,}", f"{part + rest:,}", config.data_dir, config.validation_split),
        )


def _differences(manifest: Manifest, about: dict[str, Any], split: str) -> list[str]:
    """Lists what certainly differs in the data, leaving out what another CPU's rounding explains; ids come last."""
    if split not in manifest.other_splits(about):
        return []
    before, now = (data["data"].get(split) for data in (manifest.about, about))
    if before is None or now is None:  # a set of evaluation data
        return [f"{'it' if before is None else 'the run'} has none of this name"]
    before = before if isinstance(before, dict) else {}
    if now.get("examples") == tf.data.INFINITE_CARDINALITY:  # which has no length to compare
        before = {**before, "examples": now["examples"]}
    changes = differences(*({name: data.get(name) for name in ("examples", "eval_batches")} for data in (before, now)))
    return changes + ([_OTHER_IDS] if before.get("ids") != now.get("ids") else [])


def _describe_change(manifest: Manifest, about: dict[str, Any], split: str) -> str:
    changes = _differences(manifest, about, split) or ["as many examples, of other contents"]
    kind, slash, name = split.partition("/")
    return f"the {_NAMES[kind]} data{slash and f' {name!r}'} is not that of {manifest.name} ({'; '.join(changes)})"
