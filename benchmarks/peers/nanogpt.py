"""nanoGPT's model in PyTorch, written from its description, https://github.com/karpathy/nanoGPT: GPT-2 without biases.

One product for queries, keys and values, PyTorch's fused attention, layer norms before each part, GELU, learned
positions, logits by the embedding.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


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
    """Logits of each next token, [batch, context, vocabulary]."""

    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embedding.weight)
