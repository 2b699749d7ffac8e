"""A plain loop in PyTorch, data in memory: a peer that takes turns, or a worker of DistributedDataParallel on gloo.

In the way of PyTorch's own tutorial, "Getting Started with Distributed Data Parallel",
https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html. It is a worker if RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT say which, as torchrun sets them. Needs PyTorch and NumPy, no TensorFlow.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..peer import TIMED, parse_arguments, take_turns, timed, write_result
from ..workloads import WORKLOADS, Workload


def make_model(workload: Workload) -> nn.Module:
    """Makes nanoGPT, or the layers of `benchmarks.keras_models` with their initial distribution, to compare losses."""
    if workload.decoder:
        from .nanogpt import GPT

        return GPT(**workload.decoder)
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


def to_tensors(examples) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [N, 1, 28, 28] in PyTorch's order of axes, or tokens [N, context]; labels int64 [N] or [N, context]."""
    features, labels = examples if isinstance(examples, tuple) else examples.read(np.arange(len(examples)))
    features, labels = torch.from_numpy(features), torch.from_numpy(labels).long()
    return features.permute(0, 3, 1, 2).contiguous() if features.ndim == 4 else features.long(), labels


def entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of labels; those of -1, after a text's end, do not count."""
    return nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=-1)


def batches(
    examples: tuple[torch.Tensor, torch.Tensor], size: int, rank: int, world_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's batches for ever, shuffled again each epoch: a `DistributedSampler`'s order, gathered at once."""
    features, labels = examples
    generator = torch.Generator().manual_seed(0)
    while True:
        mine = torch.randperm(len(labels), generator=generator)[rank::world_size]
        for chosen in mine.split(size):
            yield features[chosen], labels[chosen]


def main() -> None:
    is_worker = "RANK" in os.environ
    options = TIMED if is_worker else {"compile": {"choices": ("yes", "no"), "default": "no"}}
    arguments = parse_arguments(__doc__, WORKLOADS, **options)
    workload = WORKLOADS[arguments.workload]
    rank, world_size = 0, 1
    if is_worker:
        dist.init_process_group("gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()
    data = workload.load()
    torch.manual_seed(0)
    model = make_model(workload)
    trained = DistributedDataParallel(model) if is_worker else model
    if not is_worker and arguments.compile == "yes":
        trained = torch.compile(model)
    clips = workload.decoder is not None
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, eps=1e-7, fused=clips or None)  # Keras's epsilon
    stream = batches(to_tensors(data.train), workload.batch, rank, world_size)
    half = workload.precision == "bfloat16"

    def loss_of(features, labels):
        with torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext():
            logits = trained(features)
        return entropy(logits, labels)

    def train(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(*next(stream)).backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return steps / (time.perf_counter() - began)

    quality = {}
    if arguments.quality_steps:
        train(arguments.quality_steps)
        with torch.no_grad():
            features, labels = to_tensors(data.evaluation)
            logits = model(features)
            quality = {
                "loss": entropy(logits, labels).item(),
                "accuracy": (logits.argmax(-1) == labels).float().mean().item(),
            }
    if not is_worker:
        take_turns(train, quality=quality)
        return

    def agree(steps: int) -> int:
        tensor = torch.tensor(steps)
        dist.broadcast(tensor, 0)
        return int(tensor)

    rate = timed(train, arguments.seconds, agree)
    if rank == 0:
        batch = world_size * workload.batch
        write_result(arguments.result_json, {"steps_per_sec": rate, "examples_per_sec": rate * batch, **quality})
    dist.destroy_process_group()
    # Now and then PyTorch aborts as the interpreter takes its threads down ("terminate called without an active
    # exception", one run in ten): all is written, so leave without that.
    os._exit(0)


if __name__ == "__main__":
    main()
