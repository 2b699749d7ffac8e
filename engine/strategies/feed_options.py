"""How data reaches the devices, as a run asks of its strategy. Nothing here starts TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class FeedOptions:
    """How data reaches the devices.

    Attributes:
      resident_bytes: arrays up to this size are kept on each device.
      shuffle_buffer: examples in the shuffle buffer of a stream.
      auto_shard: name of a `tf.data.experimental.AutoShardPolicy`.
      shuffle_window: see `engine.data.order.order_of`.
      read_timeout_seconds: for which a source may read nothing, although it is asked; 0 is for ever.
      watch: shows people what is read beside training, an `engine.data.streamed.Watch`; None shows nothing.
    """

    resident_bytes: int = 1 << 30
    shuffle_buffer: int = 10_000
    auto_shard: str = "AUTO"
    shuffle_window: int = 0
    read_timeout_seconds: float = 0.0
    watch: Callable | None = None
