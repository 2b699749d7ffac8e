"""The quantities of a plan: needs of one step on a device, a host and the network. Plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, at the peak of a step.

    Attributes:
      weights: variables that steps read: weights, averages of weights, embedding tables, loss scale.
      gradients: gradients and their buckets.
      activations: everything else that a step computes and holds at the same time.
      data: resident examples, or the batches that wait to be used.
    """

    weights: float
    optimizer: float
    gradients: float
    activations: float
    data: float

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Message:
    """One transfer of a step, or several of the same kind and size.

    Attributes:
      bytes: bytes of one member's tensor, before it is reduced or after it is gathered.
      members: number of processes or devices that take part.
      count: number of such transfers per step; a fraction if not every step sends it.
    """

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
    bytes: float
    members: int
    link: Literal["devices", "hosts"]
    count: float = 1.0

    @property
    def wire_bytes(self) -> float:
        """Bytes that one member sends per step, by a ring: 2 (n - 1) / n of the tensor for an all-reduce.

        Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms (https://doi.org/10.1016/j.jpdc.2008.09.002).
        """
        passed = (self.members - 1) / self.members  # each member keeps its own part
        return self.count * self.bytes * passed * (2 if self.kind == "all_reduce" else 1)


@dataclasses.dataclass(frozen=True)
class Product:
    """Matrix products or convolutions of one size, on one device.

    Attributes:
      dtype: dtype of the result.
      flops: operations of one; a multiplication and an addition are two.
      bytes: bytes that one product reads and writes.
      count: number of such products per step.
    """

    dtype: str
    flops: float
    bytes: float
    count: float = 1.0


@dataclasses.dataclass(frozen=True)
class Work:
    """Needs of one training step.

    Attributes:
      replicas: number of devices over all hosts.
      memory: bytes on the fullest device.
      products: products of one device, forward and backward.
      operations: number of TensorFlow's operations that one device executes; 0 if XLA compiles the step.
      moved_bytes: bytes moved to and from one device's memory, by products and all else.
      messages: messages of one device or, over `hosts`, of one host.
      examples: examples per step, over all replicas.
      input_bytes: bytes that one host reads from files per step; 0 for data in memory.
      checkpoint_bytes: bytes of one checkpoint, over all hosts.
      steps: steps of the whole run; None if unknown.
      host_bytes: bytes on one worker's host, beside its devices: examples in arrays, and the step's program.
      uncertain: a line for each part of the memory that may differ much.
    """

    hosts: int
    replicas: int
    memory: Memory
    products: tuple[Product, ...]
    operations: float
    can_jit: bool
    moved_bytes: float
    messages: tuple[Message, ...]
    examples: int
    input_bytes: float
    checkpoint_bytes: float
    steps: int | None
    host_bytes: float = 0.0
    uncertain: tuple[str, ...] = ()

    @property
    def flops(self) -> dict[str, float]:
        """{dtype: operations} of one device's products."""
        return flops_by_dtype(self.products)


def flops_by_dtype(products: Iterable[Product]) -> dict[str, float]:
    """Sums products' operations by dtype."""
    flops: dict[str, float] = {}
    for product in products:
        flops[product.dtype] = flops.get(product.dtype, 0.0) + product.count * product.flops
    return flops
