"""Synthetic examples of a seed: a prototype for each class plus noise, of any shape and number.

NumPy only. For benchmarks and tests: nothing is read or downloaded.
"""

import math

import numpy as np

from ..engine.data.run_data import Data
from ..engine.machine.memory import usable_bytes
from .checks import InputError, check_at_least, refuse_data_dir
from .synthetic_data.philox import generator

# Root mean square distance of two prototypes, in standard deviations of the noise, whatever the
# shape. At 10 the best classifier of images hardly errs: half the distance is 5 deviations.
_SEPARATION = 10.0
# Default number of examples: MNIST's, if their features take no more bytes than this.
_EXAMPLES, _BYTES = 60_000, 768 << 20
_EVAL_EXAMPLES, _EVAL_BYTES = 10_000, 128 << 20
_CHUNK_EXAMPLES = 1024  # part of the data's definition: another number makes other examples
_PROTOTYPES, _TRAIN_LABELS, _TRAIN_NOISE, _EVAL_LABELS, _EVAL_NOISE = range(5)


def load(
    data_dir: str | None,
    seed: int,
    *,
    shape: tuple[int, ...] = (28, 28, 1),
    classes: int = 10,
    examples: int = 0,
    eval_examples: int = 0,
) -> Data:
    """Samples Gaussian classes, a pure function of the seed.

    Example i of a split depends on the seed, the shape, the classes and i, not on the number of examples: each chunk of
    examples begins at its own counter.

    Args:
      data_dir: None; a folder is refused.
      seed: seed of all random numbers.
      shape: shape of one example.
      classes: labels are sampled evenly from 0..classes-1; at least 2.
      examples: number of training examples; 0 is 60,000, or as many as take 768 MiB.
      eval_examples: number of evaluation examples; 0 is 10,000, or as many as take 128 MiB.

    Returns:
      Features float32 [N, *shape], noise of variance 1 around each class's prototype; labels
      int32 [N].

    Raises:
      InputError: an argument is out of range, the data does not fit into memory, or data_dir is set.
    """
    refuse_data_dir(data_dir, "synthetic")
    if not shape or min(shape) < 1:
        text = ",".join(str(n) for n in shape)
        raise InputError(f"shape={text}: every axis needs at least 1; use e.g. shape=28,28,1")
    check_at_least("classes", classes, 2)
    examples = examples or _limit_examples(_EXAMPLES, _BYTES, shape)
    eval_examples = eval_examples or _limit_examples(_EVAL_EXAMPLES, _EVAL_BYTES, shape)
    check_at_least("examples", examples, 1)
    check_at_least("eval_examples", eval_examples, 1)

    prototypes = generator(seed, _PROTOTYPES, 0).standard_normal((classes, *shape), np.float32)
    prototypes *= np.float32(_SEPARATION / math.sqrt(2 * math.prod(shape)))
    return Data(
        train=_sample(seed, _TRAIN_LABELS, _TRAIN_NOISE, prototypes, examples),
        evaluation=_sample(seed, _EVAL_LABELS, _EVAL_NOISE, prototypes, eval_examples),
        num_classes=classes,
    )


def _limit_examples(examples: int, limit_bytes: int, shape: tuple[int, ...]) -> int:
    return max(1, min(examples, limit_bytes // (4 * math.prod(shape))))


def _sample(
    seed: int, label_stream: int, noise_stream: int, prototypes: np.ndarray, examples: int
) -> tuple[np.ndarray, np.ndarray]:
    needed = 4 * examples * math.prod(prototypes.shape[1:])
    # The system would grant the memory, and kill the process when it fills it.
    if needed > usable_bytes():
        raise InputError(f"examples={examples} of this shape need {needed / 1e9:.0f} GB of memory; use fewer")
    features = np.empty((examples, *prototypes.shape[1:]), np.float32)
    labels = np.empty(examples, np.int32)
    for chunk, start in enumerate(range(0, examples, _CHUNK_EXAMPLES)):
        # Both fill in order, so a shorter chunk is a prefix of the whole one.
        stop = min(start + _CHUNK_EXAMPLES, examples)
        labels[start:stop] = generator(seed, label_stream, chunk).integers(
            len(prototypes), size=stop - start, dtype=np.int32
        )
        noise = generator(seed, noise_stream, chunk)
        noise.standard_normal(dtype=np.float32, out=features[start:stop])
        for example in range(start, stop):  # one by one: a chunk's prototypes together would double the memory
            features[example] += prototypes[labels[example]]
    return features, labels
