"""The random bits of an element in a loop that Inductor generates.

Written as Inductor's operations, they are hundreds, which it goes through many times: about a second of compiling for each rounding. On a
GPU they are one, in NVIDIA's PTX.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from qsim_kernels.meanings.inductor import LoopElement, by_ptx
from qsim_kernels.torch.philox import ElementNoise, random_bits


def drawn_words(noise: ElementNoise, count: int) -> LoopElement:
    """Draw an element's 32 random bits; the last 16 are zero where no more than 16 are needed.

    Args:
        noise: Their source.
        count: The number of bits that are needed.
    """
    where: Any = noise.where
    if where.device is None or where.device.type != "cuda":
        words: Any = noise.first_bits() << 16 if count <= 16 else random_bits(noise, 32)
        return words  # type: ignore[no-any-return]
    seed: Any = noise.seed
    return by_ptx(_text(draws_32=count > 16), where, seed, LoopElement.constant(noise.stream, torch.int64))


@cache
def _text(*, draws_32: bool) -> str:
    """PTX for the random bits of the element with an index, from a seed and a stream, in the lower half of a 64-bit integer."""
    from qsim_kernels.triton.device.undecided import half_word, philox_text

    lines = [
        ".reg .pred again, second;",
        ".reg .b32 key0, key1, round, low0, high0, low1, high1, odd, place, bits, later;",
        ".reg .b64 block, product0, product1;",
        "cvt.u32.u64 place, $1;",
        "and.b32 place, place, 7;",
        "shr.u64 block, $1, 3;",
        *philox_text("first", "block", "$2", "$3", "0"),
        *half_word("bits", "first", "place"),
        "shl.b32 bits, bits, 16;",
    ]
    if draws_32:
        lines += philox_text("last", "block", "$2", "$3", "0x80000000")
        lines += [*half_word("later", "last", "place"), "or.b32 bits, bits, later;"]
    return "{" + " ".join([*lines, "cvt.u64.u32 $0, bits;"]) + "}"
