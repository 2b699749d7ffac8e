"""Where and how steps run, and the inner loop. Runs on the host, which traces it around the replica's step.

The contract is in base.py; `register` adds a strategy of your own. Only the compiled steps run elsewhere: on the
replicas, or with parameter servers on workers.
"""

from .options import ClusterAddresses, FeedOptions, ServerOptions, StrategyOptions, WorkerTask
from .registry import register

__all__ = ["ClusterAddresses", "FeedOptions", "ServerOptions", "StrategyOptions", "WorkerTask", "register"]
