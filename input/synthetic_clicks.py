"""Synthetic clicks of a seed: a planted logistic model on fields of ids with a power law.

NumPy only. For benchmarks and tests of embeddings: nothing is read or downloaded.
"""

import numpy as np

from ..engine.data.run_data import Data
from .checks import InputError, check_at_least, refuse_data_dir
from .synthetic_data.philox import generator
from .synthetic_data.planted import auc, clicks, effects, power_law_ids

_BIAS = -1.0  # about three clicks in ten
_TRAIN, _EVAL = (0, 1), (2, 3)  # streams of ids and of labels


def load(
    data_dir: str | None,
    seed: int,
    *,
    fields: int = 8,
    rows: int = 500,
    examples: int = 400000,
    eval_examples: int = 50000,
    exponent: float = 1.1,
    signal: float = 2.0,
    noise: float = 0.0,
) -> Data:
    """Samples examples of ids; each id changes the odds of a click by its own weight.

    The weights are hidden. Example i of a split depends on the seed, on i and on all arguments but examples and
    eval_examples. `planted_auc` computes what a perfect model reaches; a model with one weight per id comes within 0.01
    of that with the defaults, and whenever the training split has some 50 examples for each of the fields x rows
    weights.

    Args:
      data_dir: None; a folder is refused.
      seed: seed of all random numbers.
      fields: number of ids in an example.
      rows: number of rows in each field's table. Ids are 1..rows-1; 0, which stands for a missing id elsewhere, is not
        among them.
      examples: number of training examples.
      eval_examples: number of evaluation examples.
      exponent: id k comes about as often as k**-exponent; 0 samples evenly.
      signal: about the standard deviation of the log-odds.
      noise: the fraction of labels that are random, from 0 to 1.

    Returns:
      Features {"categories": int64 [N, fields]}, labels float32 [N], 0 or 1; the vocabulary is rows.

    Raises:
      InputError: an argument is out of range, the data does not fit into memory, or data_dir is set.
    """
    refuse_data_dir(data_dir, "synthetic_clicks")
    check_at_least("examples", examples, 1)
    planted = (seed, fields, rows, exponent, signal, noise)
    train, _ = _sample(_TRAIN, examples, *planted)
    evaluation, _ = _sample(_EVAL, eval_examples, *planted)
    return Data(train, evaluation, 2, {"categories": rows})


def planted_auc(
    seed: int,
    *,
    fields: int = 8,
    rows: int = 500,
    eval_examples: int = 50000,
    exponent: float = 1.1,
    signal: float = 2.0,
    noise: float = 0.0,
) -> float:
    """Computes the area under the ROC curve that the planted model itself has on `load`'s evaluation split.

    No model can do better except by luck. Arguments and errors as for `load`.
    """
    (_, labels), logits = _sample(_EVAL, eval_examples, seed, fields, rows, exponent, signal, noise)
    return auc(labels, logits)


def _sample(
    streams: tuple[int, int],
    examples: int,
    seed: int,
    fields: int,
    rows: int,
    exponent: float,
    signal: float,
    noise: float,
):
    """Samples a split, (features, labels), and returns it with the planted log-odds float64 [examples]."""
    check_at_least("eval_examples", examples, 1)
    check_at_least("fields", fields, 1)
    check_at_least("rows", rows, 2)
    if not 0 <= exponent < np.inf:
        raise InputError(f"exponent={exponent:g} is not a falling power law; use 0 or more")
    if not 0 <= signal < np.inf:
        raise InputError(f"signal={signal:g} is not a standard deviation; use 0 or more")
    if not 0 <= noise <= 1:
        raise InputError(f"noise={noise:g} is not a share of the labels; use 0 to 1")
    try:
        # Each uniform number takes one word of the stream, so fewer examples are a prefix of more.
        ids = power_law_ids(generator(seed, streams[0]).random((examples, fields)), rows, exponent)
        logits = _BIAS + signal / np.sqrt(fields) * effects(seed, ids).sum(1)
    except (MemoryError, ValueError) as error:
        gigabytes = 8 * examples * fields / 1e9
        raise InputError(
            f"{examples} examples of {fields} fields need {gigabytes:.0f} GB of memory; use fewer"
        ) from error
    labels = clicks(generator(seed, streams[1]).random(examples), logits, noise)
    return ({"categories": ids}, labels), logits
