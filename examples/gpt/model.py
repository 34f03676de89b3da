"""The GPT-2 model: pre-norm blocks, learned positions, and an embedding that is also the last layer's weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    """The dimensions of a GPT."""

    layers: int
    width: int
    heads: int


SIZES = {
    "tiny": Size(4, 128, 4),
    "small": Size(12, 768, 12),
    "medium": Size(24, 1024, 16),
    "large": Size(36, 1280, 20),
    "xl": Size(48, 1600, 25),
}


class Block(nn.Module):
    """Attention and a multilayer perceptron."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.merge = nn.Linear(size.width, size.width)
        self.before_mlp = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream after this block."""
        query, key, value = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.before_mlp(x)), approximate="tanh"))


class Head(nn.Module):
    """The last layer, whose weight is the embedding's, and the loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, computed in float32 from logits of the weight's dtype."""
        logits = F.linear(self.norm(x), weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class GPT(nn.Module):
    """A decoder-only transformer."""

    def __init__(self, size: Size, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Embedding(context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.head = Head(size.width)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                # Two layers per block add to the residual stream; their initial weights are smaller the more of them there are.
                adds = name.endswith(("merge.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * size.layers) ** 0.5 if adds else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of predicting each target from the tokens before it."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x, self.tokens.weight, targets)

    def compile_parts(self) -> None:
        """Compile block by block, which takes as long for 48 of them as for one."""
        for part in (*self.blocks, self.head):
            part.forward = torch.compile(part.forward, dynamic=False)
