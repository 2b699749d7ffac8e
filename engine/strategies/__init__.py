"""Defines where steps run: strategies, see base.py; `register` adds one of your own. Runs on the host.

Only the compiled steps run elsewhere: on the replicas, or with parameter servers on workers.
"""

from .feed_options import FeedOptions
from .registry import StrategyOptions, register

__all__ = ["FeedOptions", "StrategyOptions", "register"]
