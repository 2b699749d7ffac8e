"""The training engine: explicit, distributed training loops for TensorFlow 2. Reads no flag, no environment."""

from engine.metrics import Mean, mean
from engine.options import StepOptions
from engine.trainer import Trainer

__all__ = ["Mean", "StepOptions", "Trainer", "mean"]
