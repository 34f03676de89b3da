"""The accumulators of a layer's three products, spelled for the formats of their operands."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim import accumulators
from qsim.accumulators import Accumulator
from qsim.formats import BF16, FP16, FP32, Format, format as resolve_format
from qsim.functional.quantizer import Quantizer
from qsim.nn.product.along import Along
from qsim.nn.product.sites import Site
from qsim.recipes.five_point import FivePoint
from qsim.scaling import PerBlock, PerTile
from qsim_kernels.ops.accumulate import computed_on_chip
from qsim_kernels.private import constant

_OWN = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}


def spelled_sum(
    accumulator: Accumulator | None, product: str, left: tuple[Site, torch.dtype], right: tuple[Site, torch.dtype]
) -> str | None:
    """The sum of a product, spelled as for the operator; `None` for torch's own.

    Args:
        accumulator: The accumulator, if any.
        product: The name of the product, for errors.
        left: The site and the dtype of the left operand.
        right: Those of the right one.
    """
    return None if accumulator is None else _sum_text(accumulator.text, product, *_facts(*left), *_facts(*right))


def multiplied_by(points: FivePoint, weight: Tensor) -> str:
    """Who computes products of a layer's size with an accumulator: the chip, the emulator, or both; empty if none has run yet."""
    sums = {how for plan in points.plans.values() for each in getattr(plan, "products", ()) if (how := each.plain.sum) is not None}
    if not sums or weight.dim() != 2:
        return ""
    rows, columns = weight.shape
    found = [False] if points.chip == "never" else computed_on_chip(sums, rows, columns, weight.device)
    if not any(found):
        return "emulator" if found else ""
    return "chip" if all(found) else f"chip ({sum(found)} of {len(found)} kinds), emulator"


def chain_of(point: Quantizer | None, along: Along, accumulator: Accumulator | None) -> int:
    """The number of products after which an accumulator's scales may change, if those of an operand's blocks or tiles enter it."""
    if accumulator is None or not accumulator.chain or point is None or point.scale is None:
        return 0
    step = along.step(point.scale)
    return accumulator.chain if step and step % accumulator.chain == 0 else 0


def _facts(site: Site, dtype: torch.dtype) -> tuple[str, str]:
    """The name of an operand, and its format as text; the dtype's where no format holds its values."""
    found = site.values(dtype)[0] or _OWN.get(dtype)
    own = site.name if site.call is None else f"{site.name} ({site.call.name})"
    in_blocks = site.quantizer is not None and isinstance(site.quantizer.scale, (PerBlock, PerTile)) and not site.chain
    name = f"{own} times its blocks' scales" if in_blocks else own
    return name, str(dtype) if found is None else found.__repr__()


def _sum_text(accumulator: str, product: str, name: str, fmt: str, other_name: str, other_fmt: str) -> str:
    how = accumulators.resolve(accumulator)
    formats = [_readable(how, product, *operand) for operand in ((name, fmt), (other_name, other_fmt))]
    return how.spelled(*formats)


def _readable(how: Accumulator, product: str, name: str, text: str) -> Format:
    """The format of an operand; raise an error if the accumulator does not take it."""
    where = f"{accumulators.name_of(how)} in {product}"
    if text.startswith("torch."):
        raise ValueError(f"{where}: operands must be numbers that float32 holds, and {name} is {text.removeprefix('torch.')}, not rounded")
    fmt = resolve_format(text)
    try:
        how.sum_of(fmt, fmt)
    except ValueError as error:
        hint = "round it there, or give three accumulators, with None for this product"
        raise ValueError(f"{where}: {name}: {error}; {hint}") from error
    return fmt


# Under torch.compile strings stay constants, and so does the result of a function marked like this.
constant(_sum_text)
