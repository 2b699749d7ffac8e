"""Fashion-MNIST: 70,000 photos of clothes, 28x28x1, 10 classes, from IDX files in --data_dir.

Without --data_dir, Keras's download.
"""

from ..engine.data.run_data import Data
from .files.mnist_files import read_or_download


def load(data_dir: str | None, seed: int) -> Data:
    """Reads Xiao, Rasul, Vollgraf: Fashion-MNIST, https://arxiv.org/abs/1708.07747.

    `seed` is not used: files are read in their order, which the pipeline shuffles.

    Returns:
      Features float32 [N, 28, 28, 1] in [0, 1], labels int32 [N] in 0..9, both splits.

    Raises:
      InputError: a file is missing or can't be used, or the download failed.
    """
    del seed
    return read_or_download(data_dir, "fashion_mnist")
