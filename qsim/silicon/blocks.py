"""A circuit of a block format: the scale of a block, or an element under it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from qsim import rounding as roundings
from qsim.formats import FP32, Float, Format, format as resolve_format, holds
from qsim.rounding import NEAREST
from qsim.scaling import Scaling
from qsim.scaling.block_formats import NAMED, Block, resolve
from qsim.silicon.circuits import described, identifier, nan_lines, rounding_lines, rounding_name
from qsim_kernels.numbers.grid import Rule
from qsim_kernels.numbers.scales import Scales, read_scales

BlockOperation = Literal["scale", "encode"]
#: The most elements of a block.
_MOST_ELEMENTS = 256


@dataclass(frozen=True)
class BlockCircuit:
    """One operation of a block format; overflow saturates.

    Args:
        format: A `Block`, or its name, such as `"mxfp8"`, `"mxfp4"` or `"nvfp4"`.
        operation: `"scale"` gives the code of a block's scale, `"encode"` that of an element under a scale with a given code.
        rounding: How elements are rounded.
        source: The format of the elements before rounding: fp32, bf16 or fp16.

    Example:
        >>> from qsim.silicon import BlockCircuit
        >>> BlockCircuit("mxfp4", "scale").name, BlockCircuit("nvfp4", source="bf16").name
        ('qsim_scale_mxfp4', 'qsim_encode_nvfp4_nearest_from_bf16')
    """

    format: Any
    operation: BlockOperation = "encode"
    rounding: Any = NEAREST
    source: Any = FP32

    def __post_init__(self) -> None:
        if self.operation not in get_args(BlockOperation):
            raise ValueError(f"operation of blocks must be one of {', '.join(map(repr, get_args(BlockOperation)))}, got {self.operation!r}")
        block, source = resolve(self.format), resolve_format(self.source)
        if not isinstance(block, Block) or not isinstance(block.size, int) or block.size > _MOST_ELEMENTS:
            has_tiles = isinstance(block, Block) and isinstance(block.size, tuple)
            needed = "with blocks in one dimension, not tiles" if has_tiles else f"of at most {_MOST_ELEMENTS} neighbours"
            raise ValueError(f"a circuit needs a block format {needed}, got {block!r}")
        if block.along(-1).draws:
            raise ValueError(f"a circuit computes scales without random bits, and the rule {block.rule!r} of {block!r} draws them")
        if not isinstance(source, Float) or source.specials != "ieee" or not holds(torch.float32, source):
            raise ValueError(f"source of blocks must be a format with infinities that float32 holds, such as fp32 or bf16, got {source!r}")
        object.__setattr__(self, "format", block)
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "rounding", roundings.resolve(self.rounding))

    @property
    def name(self) -> str:
        """The name of the function or module."""
        named = next((name for name, block in NAMED.items() if block == self.format), None)
        parts = ["qsim", self.operation, named or re.sub(r"\W+", "_", repr(self.format)).strip("_").lower()]
        parts += [rounding_name(self.rounding)] if self.operation == "encode" else []
        return "_".join([*parts, *(["from", identifier(self.source)] if self.source != FP32 else [])])

    @property
    def scaling(self) -> Scaling:
        """How scales are computed."""
        block: Block = self.format
        return block.along(-1)

    @property
    def scales(self) -> Scales:
        """The same in numbers."""
        return read_scales(*self.scaling.spelling(self.format.element))

    @property
    def has_whole(self) -> bool:
        """Whether scales are under one of the whole tensor."""
        return self.format.outer is not None

    @property
    def output(self) -> Format:
        """The format of the result."""
        fmt: Format = self.format.scale if self.operation == "scale" else self.format.element
        return fmt

    @property
    def random_bits(self) -> int:
        """The number of random bits that are read; 0 without stochastic rounding."""
        return self.rule.bits if self.operation == "encode" else 0

    @property
    def rule(self) -> Rule:
        """The rounding of elements."""
        rule: Rule = self.rounding.rule("saturate")
        return rule

    @property
    def specification(self) -> tuple[str, ...]:
        """Lines that say what the circuit computes."""
        whole = ["whole: the scale of the whole tensor, positive, as float32's bits."] if self.has_whole else []
        facts = [f"x: {described(self.source)}.", *whole, *self.format.describe().splitlines()]
        if self.operation == "scale":
            return ("The code of the scale of a block, NaN if an element is not finite.", *facts)
        scale = f"scale: the code of a positive number, or of NaN, in {described(self.format.scale)}."
        rounded = rounding_lines(self.rounding, self.random_bits)
        return ("The code of an element divided by its scale.", *facts, scale, *rounded, *nan_lines(self.output))
