"""A worker of PyTorch's DistributedDataParallel on gloo, in the way of PyTorch's own tutorial. Runs in a worker.

"Getting Started with Distributed Data Parallel", https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html,
with the data in memory and nothing compiled. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which worker this is, as
torchrun sets them. Needs PyTorch and NumPy, no TensorFlow.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..workloads import BATCH_SIZE, WORKLOADS, Workload


def make_model(workload: Workload) -> nn.Module:
    """The layers of `benchmarks.keras_models`, and their initial distribution, so that losses can be compared."""
    if workload.units:
        sizes = [784, *workload.units]
        body = [nn.Flatten()]
        for inputs, outputs in itertools.pairwise(sizes):
            body += [nn.Linear(inputs, outputs), nn.ReLU()]
    else:
        body = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
        body += [nn.Flatten(), nn.Linear(5 * 5 * 64, 64), nn.ReLU()]
        sizes = [64]
    model = nn.Sequential(*body, nn.Linear(sizes[-1], 10))
    for layer in model:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return model


def to_tensors(examples: tuple[np.ndarray, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [N, 1, 28, 28] in PyTorch's order of axes, labels int64 [N]."""
    features, labels = examples
    return torch.from_numpy(features).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels).long()


def batches(examples: tuple[torch.Tensor, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's batches for ever, shuffled again each epoch: a `DistributedSampler`'s order, gathered at once."""
    features, labels = examples
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    while True:
        mine = torch.randperm(len(labels), generator=generator)[rank::world_size]
        for chosen in mine.split(BATCH_SIZE):
            yield features[chosen], labels[chosen]


@torch.no_grad()
def evaluate(model: nn.Module, examples: tuple[torch.Tensor, torch.Tensor]) -> dict:
    features, labels = examples
    logits = model(features)
    loss = nn.functional.cross_entropy(logits, labels)
    return {"loss": loss.item(), "accuracy": (logits.argmax(-1) == labels).float().mean().item()}


def main() -> None:
    from ..race import parse_peer_arguments, write_result  # here, as others use this model without

    arguments = parse_peer_arguments(__doc__)
    dist.init_process_group("gloo")
    data = WORKLOADS[arguments.workload].load()
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model(WORKLOADS[arguments.workload]))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, eps=1e-7)  # Keras's epsilon
    loss_fn = nn.CrossEntropyLoss()
    stream = batches(to_tensors(data.train))

    def train(steps: int) -> float:
        for _ in range(steps):
            features, labels = next(stream)
            optimizer.zero_grad()
            loss = loss_fn(model(features), labels)
            loss.backward()
            optimizer.step()
        return loss.item()

    train(arguments.quality_steps)
    quality = evaluate(model.module, to_tensors(data.evaluation))
    train(arguments.warm_up_steps)
    dist.barrier()
    before = time.perf_counter()
    loss = train(arguments.steps)
    rate = arguments.steps / (time.perf_counter() - before)
    if dist.get_rank() == 0:
        environment = {"versions": {"torch": torch.__version__}, "threads": torch.get_num_threads()}
        write_result(arguments.result_json, {"steps_per_sec": rate, "train": loss, **quality, **environment})
    dist.destroy_process_group()
    # Now and then PyTorch aborts as the interpreter takes its threads down ("terminate called without an active
    # exception", one run in ten): all is written, so leave without that.
    os._exit(0)


if __name__ == "__main__":
    main()
