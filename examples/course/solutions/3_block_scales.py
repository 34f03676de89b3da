"""Solutions of the notebook on block scales."""

import math

import torch

import qsim


def block_scale(largest):
    """The smallest power of two s with largest / s <= 6."""
    return 2.0 ** math.ceil(math.log2(largest / 6))


def quantize_blocks(x, size):
    """A vector rounded to E2M1 in blocks of `size`, each with a scale of its own."""
    blocks = []
    for block in x.split(size):
        scale = block_scale(block.abs().max().item())
        blocks.append(qsim.quantize(block / scale, "e2m1") * scale)
    return torch.cat(blocks)


def bits_per_number(element_bits, scale_bits, size):
    """The mean number of bits of a number in blocks."""
    return element_bits + scale_bits / size
