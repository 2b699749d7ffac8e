"""Defines where and how steps run: strategies of one process, the inner loop, its checks. Runs on the host.

The contract is in base.py; `register` adds a strategy of your own. Only the compiled steps run elsewhere: on the
replicas, or with parameter servers on workers.
"""

from .options import ClusterAddresses, FeedOptions, ServerOptions, StrategyOptions, WorkerTask
from .registry import register

__all__ = ["ClusterAddresses", "FeedOptions", "ServerOptions", "StrategyOptions", "WorkerTask", "register"]
