"""Where steps run. base.py says what a strategy is; `register` takes one of your own."""

from .registry import FeedOptions, StrategyOptions, register

__all__ = ["FeedOptions", "StrategyOptions", "register"]
