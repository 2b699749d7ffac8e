"""Defines where steps run: strategies, see base.py; `register` adds one of your own. Runs on the host.

Only the compiled steps run elsewhere: on the replicas, or with parameter servers on workers.
"""

from .options import ClusterAddresses, FeedOptions, ServerOptions, StrategyOptions, WorkerTask
from .registry import register

__all__ = ["ClusterAddresses", "FeedOptions", "ServerOptions", "StrategyOptions", "WorkerTask", "register"]
