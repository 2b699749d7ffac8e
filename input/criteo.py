"""Criteo's click logs: 13 integers, 26 categories, clicked or not; from --data_dir, or synthetic.

NumPy only; files are read by `pyarrow`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..engine.data.run_data import Data
from .checks import InputError, check_at_least
from .files import listing
from .synthetic_data.philox import generator, mix
from .synthetic_data.planted import clicks, effects, power_law_ids
from .tables.csv_records import CsvLayout, Records
from .tables.csv_types import Converter
from .tables.folders import TableFiles
from .tables.parquet_table import library

_INTEGERS, _CATEGORIES = 13, 26
_INTEGER_NAMES = [f"I{number}" for number in range(1, _INTEGERS + 1)]
_CATEGORY_NAMES = [f"C{number}" for number in range(1, _CATEGORIES + 1)]

_KIND = listing.FileKind(
    "train.txt, day_0, day_1 ..., or any .txt or .tsv file, plain or .gz",
    (r"train\.(txt|tsv)|day_[0-9]+(\.(txt|tsv))?", r".*\.(txt|tsv)"),
    "expected lines of data, found 0 bytes",
)

_GENERATED = 100_000
# How many values each category has in the Kaggle challenge's training file.
_CARDINALITIES = np.array(
    "1460 583 10131227 2202608 305 24 12517 633 3 93145 5683 8351593 3194 "
    "27 14992 5461306 10 5652 2173 4 7046547 18 15 286181 105 142572".split(),
    np.int64,
)
_EXPONENT = 1.1
_TAIL = 1.5  # the integers' tail: most are small, the largest are millions
_BIAS, _SIGNAL = -1.5, 1.5  # about a quarter clicks, as in the challenge
_MISSING = 0.1  # fraction of the generated integers and categories
_INTEGER_SAMPLES, _CATEGORY_SAMPLES, _LABEL_SAMPLES = range(3)


def load(
    data_dir: str | None,
    seed: int,
    *,
    examples: int = 0,
    hash_buckets: int = 100000,
    eval_share: float = 0.1,
    max_bad_records: int = 0,
) -> Data:
    """Reads the format of Kaggle's Display Advertising Challenge (2014) and of Criteo's terabyte of click logs.

    A line has the label, I1..I13 and C1..C26, separated by tabs; integers and categories may be missing. In a folder,
    train.txt and the files of days are read; without any, every .txt and .tsv. Without data_dir, examples are synthetic
    from the seed: categories follow a power law and have as many values as Criteo's, a tenth of all values is missing,
    and a planted logistic model of both gives the labels.

    Args:
      data_dir: a file or a folder; None makes synthetic ones.
      seed: seed of the synthetic examples; a file's examples do not depend on it.
      examples: how many examples to take, from the beginning of the files; 0 takes all, or makes 100,000.
      hash_buckets: ids of each category: 0 is a missing value, 1..hash_buckets-1 hashed ones. The hash
        depends on the value alone.
      eval_share: fraction of the lines, the last ones, for evaluation; between 0 and 1.
      max_bad_records: number of malformed lines to skip before an error; one warning counts them.

    Returns:
      Features {"dense": float32 [N, 13], "categories": int64 [N, 26]}, labels float32 [N], 0 or 1.
      An integer x becomes log(1 + x); a missing or negative one becomes 0, as in DLRM's own
      preprocessing (Naumov et al. 2019). The vocabulary is hash_buckets.

    Raises:
      InputError: no file, too many malformed lines, or an argument out of range.
    """
    check_at_least("examples", examples, 0)
    check_at_least("hash_buckets", hash_buckets, 2)
    check_at_least("max_bad_records", max_bad_records, 0)
    if not 0 < eval_share < 1:
        raise InputError(f"{eval_share=:g} is not a share of the examples; use a number between 0 and 1, e.g. 0.1")
    if data_dir:
        integers, values, missing, labels = _read(data_dir, examples, max_bad_records)
    else:
        integers, values, missing, labels = _generate(seed, examples or _GENERATED)
    dense = np.log1p(np.maximum(integers, 0).astype(np.float32))
    categories = 1 + (mix(values.astype(np.uint64)) % np.uint64(hash_buckets - 1)).astype(np.int64)
    categories[missing] = 0
    count = len(labels)
    if count < 2:
        source = f"data_dir={data_dir}" if data_dir else f"{examples=}"
        raise InputError(f"{source} holds {count} usable rows: expected at least 2, one for each split")
    cut = count - min(max(round(count * eval_share), 1), count - 1)  # neither split is empty

    def selected(rows: slice):
        return {"dense": dense[rows], "categories": categories[rows]}, labels[rows]

    return Data(selected(slice(None, cut)), selected(slice(cut, None)), 2, {"categories": hash_buckets})


def _read(data_dir: str, examples: int, max_bad_records: int) -> tuple[np.ndarray, ...]:
    """Reads the first `examples` (0: all): integers int64, categories uint32, their missing mask, labels float32."""
    library("criteo")
    import pyarrow.compute as pc

    files = listing.find(data_dir, _KIND)
    converters = {"label": Converter("int", "^[01]$", "a label 0 or 1")}
    converters |= dict.fromkeys(_INTEGER_NAMES, Converter("int", expects="an integer or nothing"))
    hexadecimal = Converter("text", "^[0-9a-fA-F]{0,8}$", "up to 8 hexadecimal digits or nothing")
    converters |= dict.fromkeys(_CATEGORY_NAMES, hexadecimal)
    layout = CsvLayout("\t", tuple(converters), has_quotes=False)
    records = Records(TableFiles(files, {}), [layout] * len(files.paths), 1, converters, max_bad_records)
    pieces = []
    for _, table in records.tables(examples):
        integers = np.stack([table[name].fill_null(0).to_numpy() for name in _INTEGER_NAMES], 1)
        values = np.stack([_numbers_from_hexadecimal(table[name]) for name in _CATEGORY_NAMES], 1)
        missing = np.stack([pc.equal(table[name], "").to_numpy() for name in _CATEGORY_NAMES], 1)
        pieces.append((integers, values, missing, table["label"].to_numpy().astype(np.float32)))
    return tuple(np.concatenate(column)[: examples or None] for column in zip(*pieces, strict=True))


def _numbers_from_hexadecimal(column: Any) -> np.ndarray:
    """Parses hexadecimal digits as uint32; an empty field is 0."""
    coded = column.combine_chunks().dictionary_encode()
    words = coded.dictionary.to_pylist()
    return np.fromiter((int(word or "0", 16) for word in words), np.uint32, len(words))[coded.indices]


def _generate(seed: int, examples: int) -> tuple[np.ndarray, ...]:
    """Samples the columns that `_read` returns; example i depends on the seed and on i alone."""
    # Each uniform sample takes one word of its stream, so fewer examples are a prefix of more.
    samples = generator(seed, _INTEGER_SAMPLES).random((examples, 2, _INTEGERS))
    integers = np.minimum((1 - samples[:, 0]) ** -_TAIL - 1, 2.0**31).astype(np.int64)
    integers[samples[:, 1] < _MISSING] = 0
    samples = generator(seed, _CATEGORY_SAMPLES).random((examples, 2, _CATEGORIES))
    values = power_law_ids(samples[:, 0], _CARDINALITIES + 1, _EXPONENT)
    missing = samples[:, 1] < _MISSING
    logits = np.where(missing, 0, effects(seed, values)).sum(1)
    # An integer's logarithm, roughly standardised, has one weight a column, as if it were id 0 of that column.
    weights = effects(seed, np.zeros((1, _CATEGORIES + _INTEGERS), np.int64))[0, _CATEGORIES:]
    logits += (np.log1p(integers) / _TAIL - 1) @ weights
    logits = _BIAS + _SIGNAL / np.sqrt(_INTEGERS + _CATEGORIES) * logits
    labels = clicks(generator(seed, _LABEL_SAMPLES).random(examples), logits, noise=0)
    return integers, values.astype(np.uint32), missing, labels
