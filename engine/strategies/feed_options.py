"""Options for how data reaches the devices. Does not start TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class FeedOptions:
    """Options for how data reaches the devices.

    Attributes:
      resident_bytes: arrays up to this size are cached on each device.
      shuffle_buffer: examples in the shuffle buffer of a stream.
      auto_shard: name of a `tf.data.experimental.AutoShardPolicy`.
      shuffle_window: see `engine.data.lengths.source_order`.
      read_timeout_seconds: limit on a source's reads without progress; 0 waits for ever.
      watch: shows progress of reading besides training, an `engine.data.streamed.Watch`; None shows nothing.
    """

    resident_bytes: int = 1 << 30
    shuffle_buffer: int = 10_000
    auto_shard: str = "AUTO"
    shuffle_window: int = 0
    read_timeout_seconds: float = 0.0
    watch: Callable | None = None
