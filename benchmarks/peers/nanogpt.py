"""nanoGPT's model in PyTorch, written from its description, as a peer that takes turns (`turns.py`).

https://github.com/karpathy/nanoGPT: GPT-2 without biases. One product for queries, keys and values, PyTorch's fused
attention, layer norms before each part, GELU, learned positions, logits by the embedding; bfloat16 by autocast. Adam,
gradients clipped to a norm of 1. Needs PyTorch and NumPy, no TensorFlow.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ..turns import take_turns


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.join = nn.Linear(width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(x).split(width, 2)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.join(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)

    def forward(self, tokens, labels):
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def take(self, weights: dict[str, np.ndarray], heads: int) -> None:
        """Takes the weights of `crankshaft.models.transformer_lm`, by their paths there."""
        initial = {path.removeprefix("decoder/"): torch.from_numpy(value) for path, value in weights.items()}
        own = {}
        for name in self.state_dict():
            path = name.replace("blocks.", "block_").replace(".", "/")
            value = next(v for p, v in initial.items() if p.rpartition("/")[0] == path.rpartition("/")[0])
            if value.ndim == 2 and "embedding" not in path and "positions" not in path:
                value = value.T
            if "qkv" in path:  # head by head: a head's query, key and value; here all queries come first
                width = value.shape[1]
                value = value.reshape(heads, 3, width // heads, width).transpose(0, 1).reshape(3 * width, width)
            own[name] = value.contiguous()
        self.load_state_dict(own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="what benchmarks/language_model.py has written")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--quality_json", help="train on the data's steps, and write the loss of its evaluation here")
    arguments = parser.parse_args()
    with np.load(arguments.data) as data:
        weights = {name.removeprefix("weights/"): data[name] for name in data if name.startswith("weights/")}
        shape, rate, batches, evaluation = (
            json.loads(str(data["shape"])),
            float(data["rate"]),
            data["train"],
            data["eval"],
        )
    model = GPT(**shape)
    model.take(weights, shape["heads"])
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, eps=1e-10, fused=True)
    compiled = torch.compile(model) if arguments.compiled else model
    half = arguments.precision == "bfloat16"

    def loss_of(windows):
        windows = torch.from_numpy(windows).long()
        with torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext():
            return compiled(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())

    def train(steps: int) -> float:
        began = time.perf_counter()
        for step in range(steps):
            optimizer.zero_grad(set_to_none=True)
            loss_of(batches[step % len(batches)]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return steps / (time.perf_counter() - began)

    if arguments.quality_json:
        train(len(batches))
        with torch.no_grad():
            value = float(np.mean([loss_of(batch).item() for batch in evaluation]))
        Path(arguments.quality_json).write_text(json.dumps({"loss": value}), encoding="utf-8")
    else:
        take_turns(train)


if __name__ == "__main__":
    main()
