"""Block formats: an element format and a scale per block of elements."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import lru_cache

import torch

from qsim.formats import E2M1, E2M3, E3M2, E4M3, E5M2, FP32, Fixed, Format, format as resolve_format, name_of
from qsim.formats.base import check_integer
from qsim.scaling.base import PerTensor, Rule, Scaling
from qsim.scaling.tiling import PerBlock, PerTile
from qsim.text.parsing import read_call


@dataclass(frozen=True, init=False, repr=False)
class Block:
    """A format whose values are grouped into blocks, each with a scale.

    Block floating point (integers with a shared exponent) is `Block(Fixed(bits, bits - 2), size)`; with one exponent per row, use a scale:
    `quantize(x, Fixed(bits, bits - 2), scale=PerRow(format="e8m0", rule="floor"))`.

    Args:
        element: The elements' format.
        size: Number of elements that share a scale, along the dimension of the call; or the height and width of tiles of a matrix.
        scale: The scales' format; powers of two by default, as in OCP's MX formats.
        rule: How a scale follows from its elements: see `qsim.scaling.Scaling`.
        outer: A scale of the whole tensor, which scales these scales: `PerTensor(…)`, its `repr`, or "tensor" for `PerTensor()`.

    Example:
        >>> import torch, qsim
        >>> qsim.quantize(torch.tensor([0.1, 0.2, 0.3, 60.0]), qsim.Block("e2m1", size=2))
        tensor([ 0.0938,  0.1875,  0.0000, 48.0000])
        >>> qsim.quantize(torch.tensor([0.1, 0.2, 0.3, 60.0]), "mxfp4")
        tensor([ 0.,  0.,  0., 48.])
    """

    element: Format
    size: int | tuple[int, int]
    scale: Format
    rule: Rule
    outer: PerTensor | None

    def __init__(
        self,
        element: str | torch.dtype | Format,
        size: int | tuple[int, int],
        scale: str | torch.dtype | Format = "e8m0",
        rule: Rule = "floor",
        outer: PerTensor | str | None = None,
    ) -> None:
        object.__setattr__(self, "element", resolve_format(element))
        if isinstance(size, tuple):
            if len(size) != 2:
                raise ValueError(f"Block: size must be a number, or height and width of a tile, got {size}")
            for name, number in zip(("height", "width"), size, strict=True):
                check_integer("Block", name, number, 1, 2**31)
        else:
            check_integer("Block", "size", size, 1, 2**31)
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "scale", resolve_format(scale))
        object.__setattr__(self, "rule", rule)
        object.__setattr__(self, "outer", outer)
        object.__setattr__(self, "outer", self.along(-1).outer)

    def __repr__(self) -> str:
        element, scale = (name_of(fmt) for fmt in (self.element, self.scale))
        outer = "" if self.outer is None else f", outer={repr(self.outer)!r}"
        return f"Block({element!r}, {self.size}, scale={scale!r}, rule={self.rule!r}{outer})"

    @property
    def bits(self) -> float:
        """Bits per element, including its share of the block's scale; a scale of the whole tensor is not counted.

        Example:
            >>> from qsim.scaling import block_formats
            >>> block_formats.MXFP4.bits, block_formats.NVFP4.bits
            (4.25, 4.5)
        """
        height, width = self.size if isinstance(self.size, tuple) else (1, self.size)
        return self.element.bits + self.scale.bits / (height * width)

    def describe(self) -> str:
        """Properties of the block format, one per line.

        Example:
            >>> from qsim.scaling import block_formats
            >>> print(block_formats.NVFP4.describe())
            Block('e2m1', 16, scale='e4m3', rule='fit', outer="PerTensor(format='fp32', rule='fit')")
              bits             4.5 an element
              elements         e2m1, 4 bits, up to 6 in magnitude
              scale            e4m3, 8 bits, one for 16 neighbours, by the rule 'fit'
              outer            one of the whole tensor, fp32, by the rule 'fit'
        """
        who = f"{self.size} neighbours" if isinstance(self.size, int) else f"a tile of {self.size[0]} × {self.size[1]}"
        element = f"{name_of(self.element)}, {self.element.bits} bits, up to {self.element.max:g} in magnitude"
        scale = f"{name_of(self.scale)}, {self.scale.bits} bits, one for {who}, by the rule {self.rule!r}"
        facts = [("bits", f"{self.bits:g} an element"), ("elements", element), ("scale", scale)]
        if self.outer is not None:
            facts.append(("outer", f"one of the whole tensor, {name_of(self.outer.format)}, by the rule {self.outer.rule!r}"))
        return "\n".join([repr(self), *(f"  {name:<16} {fact}" for name, fact in facts)])

    def along(self, dim: int) -> Scaling:
        """Scale of blocks along a dimension; tiles are always in the last two."""
        return _along(self, dim) if torch.compiler.is_compiling() else _known_along(self, dim)


def _along(spec: Block, dim: int) -> Scaling:
    if isinstance(spec.size, tuple):
        return PerTile(*spec.size, format=spec.scale, rule=spec.rule, outer=spec.outer)
    return PerBlock(spec.size, dim, format=spec.scale, rule=spec.rule, outer=spec.outer)


_known_along = lru_cache(maxsize=1024)(_along)

#: OCP's MXFP8 with E4M3 elements, in blocks of 32 with power-of-two scales.
MXFP8_E4M3 = Block(E4M3, 32)
#: The same with E5M2 elements.
MXFP8_E5M2 = Block(E5M2, 32)
#: OCP's MXFP6 with E3M2 elements.
MXFP6_E3M2 = Block(E3M2, 32)
#: The same with E2M3 elements.
MXFP6_E2M3 = Block(E2M3, 32)
#: OCP's MXFP4, with E2M1 elements.
MXFP4 = Block(E2M1, 32)
#: OCP's MXINT8, whose elements are multiples of 1/64.
MXINT8 = Block(Fixed(8, 6), 32)
#: NVIDIA's NVFP4: E2M1 elements, one E4M3 scale per 16 of them, and one scale of the whole tensor.
NVFP4 = Block(E2M1, 16, scale=E4M3, rule="fit", outer=PerTensor(FP32))
#: E4M3 elements with power-of-two scales, one per 128 neighbours.
FP8_1X128 = Block(E4M3, 128, rule="ceil")
#: E4M3 elements with power-of-two scales, one per tile of 128 × 128.
FP8_128X128 = Block(E4M3, (128, 128), rule="ceil")

#: Every named block format by its name.
NAMED: dict[str, Block] = {
    "mxfp8": MXFP8_E4M3,
    "mxfp8_e4m3": MXFP8_E4M3,
    "mxfp8_e5m2": MXFP8_E5M2,
    "mxfp6": MXFP6_E3M2,
    "mxfp6_e3m2": MXFP6_E3M2,
    "mxfp6_e2m3": MXFP6_E2M3,
    "mxfp4": MXFP4,
    "mxfp4_e2m1": MXFP4,
    "mxint8": MXINT8,
    "nvfp4": NVFP4,
    "fp8_1x128": FP8_1X128,
    "fp8_128x128": FP8_128X128,
}


def resolve(spec: str | torch.dtype | Format | Block) -> Format | Block:
    """Resolve a block format by its name or `repr`; resolve anything else with `qsim.format`.

    Raises:
        ValueError: If nothing has that name.

    Example:
        >>> from qsim.scaling import block_formats
        >>> block_formats.resolve("MXFP4") == block_formats.MXFP4
        True
    """
    if isinstance(spec, Block):
        return spec
    if not isinstance(spec, str):
        return resolve_format(spec)
    return _by_name(spec) if torch.compiler.is_compiling() else _known_by_name(spec)


def _by_name(spec: str) -> Format | Block:
    found: Block | None = NAMED.get(spec.lower())
    # Compiled code resolves names again, but cannot parse.
    if found is None and "(" in spec:
        found = read_call(spec, {"Block": Block})
    if found is not None:
        return found
    try:
        return resolve_format(spec)
    except ValueError as error:
        close = difflib.get_close_matches(spec.lower(), NAMED, n=1, cutoff=0.8)
        if not close:
            raise
        raise ValueError(f"unknown format {spec!r}: did you mean {close[0]!r}?") from error


_known_by_name = lru_cache(maxsize=1024)(_by_name)
