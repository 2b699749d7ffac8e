"""Where steps run. base.py says what a strategy is; `register` takes one of your own."""

from .feed_options import FeedOptions
from .registry import StrategyOptions, register

__all__ = ["FeedOptions", "StrategyOptions", "register"]
