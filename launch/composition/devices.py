"""Creates strategies by name, with their devices, before anything else uses a device."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ...engine import devices
from ...engine.errors import UsageError
from ...engine.machine import gpus
from ...engine.mesh.layout import Mesh
from ...engine.strategies import registry
from ...engine.strategies.base import Strategy
from ...engine.strategies.options import StrategyOptions
from ...engine.strategies.replicated import Replicated


def create(name: str, **settings: Any) -> Strategy:
    """Creates a strategy.

    Args:
      name: name of a built-in or registered strategy.
      settings: the fields of `StrategyOptions`.
    """
    options = StrategyOptions(**settings)
    # A coordinator computes nothing, and TensorFlow would take the memory of each GPU that it sees.
    gpus.use_only(
        () if name == "parameter_server" and options.gpus is None else options.gpus,
        1 if name == "one_device" and options.owns_process else None,
    )
    if options.deterministic and name != "parameter_server":  # whose workers' updates come in any order
        gpus.make_deterministic()
    if name == "parameter_server":
        from ...parts.parameter_servers import strategy as parameter_server

        assert options.servers
        return parameter_server.ParameterServer(parameter_server.connect(options.servers.cluster), options)
    if name not in registry.BUILT_IN:
        strategy = registry.registered(name)(options)
        if not isinstance(strategy, Strategy):
            kind = type(strategy).__name__
            raise UsageError(f"what was registered as the strategy {name} makes a {kind}; make a Strategy")
        return strategy
    distribution: tf.distribute.Strategy
    micro_batches = 1
    if name == "multi_worker":
        from ...parts.workers import multi_worker

        distribution = multi_worker.connect(options.task, options.communication)
    elif name == "one_device":
        if options.owns_process:
            micro_batches = devices.set_threads_per_micro_batch(options.parallel_micro_batches)
        distribution = tf.distribute.OneDeviceStrategy("GPU:0" if tf.config.get_visible_devices("GPU") else "CPU:0")
    elif name == "tpu":
        distribution = devices.find_tpu(options.tpu_address)
    elif options.num_virtual_devices or not isinstance(options.distribution, tf.distribute.MirroredStrategy):
        distribution = devices.mirror(options.num_virtual_devices, options.owns_process)
    else:
        distribution = options.distribution
    mesh = Mesh()
    if options.mesh or options.shard_optimizer:
        from ...parts.sharding.mesh import lay_out

        mesh = lay_out(distribution, options.mesh, options.shard_optimizer)
    if name == "multi_worker":
        return multi_worker.MultiWorker(distribution, options, mesh)
    return Replicated(name, distribution, options, mesh, micro_batches)
