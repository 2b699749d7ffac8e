"""A decoder in PyTorch, sharded over the processes by Megatron-LM's description, on gloo. A worker.

Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053: columns, then rows, a sum after them; the embedding and the loss
sharded by vocabulary. PyTorch's fused attention, layer norms, GELU, learned positions, Adam. RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT say which worker this is, as torchrun sets them. Needs PyTorch and NumPy, no TensorFlow.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from ..peer import TIMED, parse_arguments, timed, write_result
from ..workloads import WORKLOADS


class Enter(torch.autograd.Function):
    """Hands a whole value to sharded layers; sums its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dy):
        dy = dy.contiguous()
        dist.all_reduce(dy)
        return dy


class Leave(torch.autograd.Function):
    """Sums what each process has a term of."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy


class Block(nn.Module):
    def __init__(self, width: int, heads: int, parts: int):
        super().__init__()
        self.heads, self.size = heads // parts, width // heads
        own = self.heads * self.size
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.join = nn.Linear(width, 3 * own, bias=False), nn.Linear(own, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * own, bias=False), nn.Linear(4 * own, width, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.qkv(Enter.apply(self.norm_1(x))).chunk(3, 2)
        q, k, v = (part.view(batch, length, self.heads, self.size).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + Leave.apply(self.join(y.transpose(1, 2).reshape(batch, length, -1)))
        y = functional.gelu(self.up(Enter.apply(self.norm_2(x))), approximate="tanh")
        return x + Leave.apply(self.down(y))


class Decoder(nn.Module):
    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int):
        super().__init__()
        parts = dist.get_world_size()
        rows = -(-vocabulary // parts)
        self.first, self.padded = dist.get_rank() * rows, max(0, (dist.get_rank() + 1) * rows - vocabulary)
        self.embedding, self.positions = nn.Embedding(rows, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, parts) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)

    def forward(self, tokens, labels):
        own = tokens - self.first
        mine = (own >= 0) & (own < self.embedding.num_embeddings)
        x = Leave.apply(self.embedding(own.where(mine, 0)) * mine[..., None])
        x = x + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(Enter.apply(self.norm(x)), self.embedding.weight)
        if self.padded:
            logits[..., -self.padded :] = -1e30
        largest = logits.detach().amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        logits, own = logits - largest[..., None], labels - self.first
        mine = (own >= 0) & (own < logits.shape[-1])
        chosen = logits.gather(-1, own.where(mine, 0)[..., None])[..., 0] * mine
        sums, chosen = Leave.apply(torch.stack([logits.exp().sum(-1), chosen]))
        return (sums.log() - chosen).mean()


def main() -> None:
    arguments = parse_arguments(__doc__, WORKLOADS, **TIMED)
    workload = WORKLOADS[arguments.workload]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Decoder(**workload.decoder)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    size = workload.batch, workload.decoder["context"] + 1
    windows = torch.randint(workload.decoder["vocabulary"], size, generator=torch.Generator().manual_seed(0))

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            model(windows[:, :-1], windows[:, 1:]).backward()
            optimizer.step()

    def agree(steps: int) -> int:
        tensor = torch.tensor(steps)
        dist.broadcast(tensor, 0)
        return int(tensor)

    rate = timed(train, arguments.seconds, agree)
    if dist.get_rank() == 0:
        write_result(arguments.result_json, {"steps_per_sec": rate, "examples_per_sec": rate * workload.batch})
    dist.destroy_process_group()
    os._exit(0)  # see `torch_loop`


if __name__ == "__main__":
    main()
