"""Where steps run. base.py says what a strategy is; `register` takes one of your own."""

from crankshaft.engine.strategies.registry import FeedOptions, StrategyOptions, register

__all__ = ["FeedOptions", "StrategyOptions", "register"]
