"""Reads the four IDX files of MNIST and of data sets that copy its layout, as splits.

The layout: http://yann.lecun.com/exdb/mnist/. TensorFlow is imported only to download.
"""

import numpy as np

from ...engine.data.run_data import Data
from ..checks import InputError
from .idx import find_idx, read_idx

NUM_CLASSES = 10
IMAGE_SIZE = 28  # width and height in pixels
TRAIN_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
EVAL_NAMES = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def read_or_download(data_dir: str | None, keras_name: str) -> Data:
    """Reads splits from `data_dir`, or downloads them by Keras without a folder.

    Args:
      data_dir: a folder with TRAIN_NAMES and EVAL_NAMES, each plain or with `.gz`.
      keras_name: the data set's module in `tf.keras.datasets`.

    Returns:
      Features float32 [N, 28, 28, 1] in [0, 1], labels int32 [N] in 0..9, both splits.

    Raises:
      InputError: a file is missing or can't be used, or the download failed.
    """
    if not data_dir:
        train, evaluation = _download(keras_name)
    else:
        # All four are located before any is read, so that a missing one is reported at once.
        paths = find_idx(data_dir, TRAIN_NAMES + EVAL_NAMES)
        train, evaluation = _read_pair(*paths[:2]), _read_pair(*paths[2:])
    return Data(_to_examples(*train), _to_examples(*evaluation), NUM_CLASSES)


def _read_pair(images_path: str, labels_path: str) -> tuple[np.ndarray, np.ndarray]:
    # Labels first: they are small, so most mistakes show before the images are unpacked.
    labels = read_idx(labels_path, (None,))
    wrong = np.flatnonzero(labels >= NUM_CLASSES)
    if wrong.size:
        raise InputError(
            f"{labels_path} has labels out of range: expected 0..{NUM_CLASSES - 1}, "
            f"found {labels[wrong[0]]} at example {wrong[0]} ({wrong.size} such)"
        )
    images = read_idx(images_path, (None, IMAGE_SIZE, IMAGE_SIZE))
    if len(images) != len(labels):
        raise InputError(
            f"{images_path} holds {len(images)} images but {labels_path} holds {len(labels)} "
            "labels: expected as many of one as of the other"
        )
    return images, labels


def _download(keras_name: str):
    try:
        import tensorflow as tf  # Imported here: folders are read, and refused, without TensorFlow.

        return getattr(tf.keras.datasets, keras_name).load_data()
    except Exception as error:  # Keras raises bare Exception when a URL cannot be fetched.
        cause = " ".join(str(error).split()) or type(error).__name__
        names = ", ".join(TRAIN_NAMES + EVAL_NAMES)
        raise InputError(
            f"input={keras_name} has no data_dir and Keras could not download it ({cause}); put {names}, plain or .gz, "
            "in one folder and pass data_dir=FOLDER"
        ) from error


def _to_examples(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.divide(images, np.float32(255), dtype=np.float32)[..., np.newaxis], labels.astype(np.int32)
