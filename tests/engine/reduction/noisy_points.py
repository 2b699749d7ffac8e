"""Four classes of noisy points, for tests that train a small net on them."""

import numpy as np


def four_classes(examples=338):
    """(features float32 [examples, 20], labels int32); 338 by 16 leaves a batch of 2."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, examples).astype(np.int32)
    return (rng.normal(size=(examples, 20)) + np.eye(4, 20)[labels]).astype(np.float32), labels
