"""UCI's handwritten digits, bundled: 1,797 scans of 8x8 scaled to 28x28x1, 10 classes.

NumPy only. Source and licence of the file: input/data/README.md.
"""

import gzip
import pkgutil
import zlib

import numpy as np

from ..engine.data.run_data import Data
from .checks import InputError, refuse_data_dir

_FILE = "data/digits.csv.gz"
_CONTENT = pkgutil.get_data(__package__, _FILE) or b""  # with the code, which may be in an archive, or be replaced
_SCANS = 1797
_SCAN_SIZE = 8  # width and height in pixels
_MAX_VALUE = 16  # a pixel counts the inked dots of a 4x4 block
_SCALED_SIZE = 24
_MARGIN = 2  # blank pixels on each side: 28x28, with an edge as MNIST has it
_EVAL_EVERY = 5


def load(data_dir: str | None, seed: int) -> Data:
    """Reads Alpaydin, Kaynak: Optical Recognition of Handwritten Digits, doi.org/10.24432/C50P49.

    The split is fixed: scans are sorted by class, in file order within a class, and every fifth is for evaluation. So
    both splits have all classes in the file's proportions, independently of `seed`. Scans are scaled to 24x24
    bilinearly, with a margin of 2.

    Returns:
      Features float32 [N, 28, 28, 1] in [0, 1], labels int32 [N] in 0..9; N is 1,437 for training
      and 360 for evaluation.

    Raises:
      InputError: the bundled file is damaged, or data_dir is set.
    """
    del seed
    refuse_data_dir(data_dir, "digits")
    scans, labels = read_scans(_CONTENT)
    # Rows of weights mix the two nearest pixels; pixels are areas, and edges repeat.
    positions = (np.arange(_SCALED_SIZE) + 0.5) * _SCAN_SIZE / _SCALED_SIZE - 0.5
    positions = np.clip(positions, 0, _SCAN_SIZE - 1)
    weights = np.maximum(0, 1 - np.abs(positions[:, np.newaxis] - np.arange(_SCAN_SIZE)))
    scaled = weights @ (scans / _MAX_VALUE) @ weights.T
    margins = ((0, 0), (_MARGIN, _MARGIN), (_MARGIN, _MARGIN))
    features = np.pad(scaled.astype(np.float32), margins)[..., np.newaxis]  # [N, 28, 28, 1] in [0, 1]
    by_class = np.argsort(labels, kind="stable")
    is_eval = np.zeros(len(labels), bool)
    is_eval[by_class[::_EVAL_EVERY]] = True
    return Data(
        train=(features[~is_eval], labels[~is_eval]),
        evaluation=(features[is_eval], labels[is_eval]),
        num_classes=10,
    )


def read_scans(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Reads scans float64 [1797, 8, 8] in 0..16 and labels int32 [1797]."""
    columns = _SCAN_SIZE * _SCAN_SIZE + 1
    try:
        table = np.loadtxt(gzip.decompress(content).decode("ascii").splitlines(), delimiter=",", ndmin=2)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        cause = " ".join(str(error).split())
        raise InputError(f"{_FILE}: expected the bundled digits, found: {cause}") from error
    if table.shape != (_SCANS, columns):
        raise InputError(f"{_FILE}: expected a table of {_SCANS}x{columns}, found {table.shape[0]}x{table.shape[1]}")
    return table[:, :-1].reshape(-1, _SCAN_SIZE, _SCAN_SIZE), table[:, -1].astype(np.int32)
