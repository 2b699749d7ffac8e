"""The training of PyTorch's DDP on gloo whose workers `benchmarks.recovery` kills. A worker of torchrun.

In the way of "Fault-tolerant Distributed Training with torchrun",
https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html: rank 0 saves a snapshot, from which all
ranks continue when torchrun has started them again. One is saved as often as takes 0.5 % of the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..faults.plan import PLAN, Notes
from ..workloads import BATCH_SIZE, WORKLOADS
from .torch_loop import make_model, to_tensors

NOTED_EVERY_STEPS = 10
_COST = 0.005  # the part of the time that snapshots may take


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Replaces the snapshot; returns the seconds that it took."""
    began = time.monotonic()
    new = path.with_suffix(".new")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, new)
    new.replace(path)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--examples", type=int, required=True)
    arguments = parser.parse_args()
    workload = dataclasses.replace(WORKLOADS["mlp"], examples=arguments.examples)
    rank = int(os.environ["RANK"])
    notes = Notes(os.environ[PLAN], f"worker {rank}")
    notes.write("starts", os.getpid())
    dist.init_process_group("gloo")
    features, labels = to_tensors(workload.load().train)
    torch.manual_seed(0)
    model = make_model(workload)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, eps=1e-7)  # Keras's epsilon
    snapshot, first = notes.folder / "snapshot.pt", 0
    if snapshot.exists():
        found = torch.load(snapshot)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["step"]
    parallel, loss_fn = DistributedDataParallel(model), nn.CrossEntropyLoss()
    notes.write("begins", first)
    per_epoch, share = len(labels) // (2 * BATCH_SIZE), rank * BATCH_SIZE
    epoch, next_save = -1, 0.0
    for step in range(first, arguments.steps):
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        at = step % per_epoch * 2 * BATCH_SIZE + share
        chosen = order[at : at + BATCH_SIZE]
        optimizer.zero_grad()
        loss_fn(parallel(features[chosen]), labels[chosen]).backward()
        optimizer.step()
        if rank == 0 and (step + 1) % NOTED_EVERY_STEPS == 0:
            notes.write("step", step + 1)
        if rank == 0 and time.monotonic() > next_save:
            took = save(snapshot, step + 1, model, optimizer)
            next_save = time.monotonic() + took / _COST
    os._exit(0)  # see `torch_loop`


if __name__ == "__main__":
    main()
