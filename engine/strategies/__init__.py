"""Strategies: where steps run. base.py defines them; `register` adds one of your own."""

from .feed_options import FeedOptions
from .registry import StrategyOptions, register

__all__ = ["FeedOptions", "StrategyOptions", "register"]
