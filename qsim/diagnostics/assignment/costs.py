"""The cost of a layer's points: bits per element, time of the products, or lookup tables of the hardware that multiplies and adds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from torch import Tensor

from qsim.accumulators import Accumulator, Rounded
from qsim.formats import FP32, Format
from qsim.functional.quantizer import Quantizer
from qsim.nn.converting.checks import layer_product
from qsim.nn.converting.layers import is_conv1d
from qsim.nn.modules import FivePointModule
from qsim.nn.product.along import Along, along
from qsim.nn.product.arithmetic import rows
from qsim.recipes.five_point import FivePoint

#: What a budget limits.
Cost = Literal["bits", "time", "luts"]
#: The points whose operands each of the three products multiplies.
PRODUCTS = (("act", "weight"), ("grad", "weight_bwd"), ("grad_w", "act_bwd"))
#: The widths at which matrix units have a rate: half as many bits take half the time.
_WIDTHS = (4, 8, 16, 32)
#: The width to which times are relative.
_REFERENCE = 16


@dataclass(frozen=True)
class LayerSize:
    """The size of a layer's work on a batch.

    Attributes:
        shapes: The shapes of the tensors that are rounded: the input as `act`, the weight, and the gradient of the result as `grad`.
        along: The dimensions of the scales at each point.
        multiply_adds: The multiply-adds of one of the three products.
        bits: The bits of an element that is not rounded.
    """

    shapes: Mapping[str, tuple[int, ...]]
    along: Mapping[str, Along]
    multiply_adds: int
    bits: int

    def elements(self, point: str) -> int:
        """The number of elements that are rounded at a point."""
        return math.prod(self.shapes[tensor_of(point)])


def size_of(layer: FivePointModule, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> LayerSize:
    """The size of a layer's work, given its inputs in all calls, and the gradients of its results."""
    weight: Any = layer.weight
    product = layer_product(layer)
    shapes = {"weight": tuple(weight.T.shape if is_conv1d(layer) else weight.shape)}
    for name, tensors in (("act", inputs), ("grad", gradients)):
        matrices = [rows(x) for x in tensors] if product.merges_rows else tensors
        shapes[name] = (sum(len(x) for x in matrices), *matrices[0].shape[1:])
    # Each element of the side that the weight's first dimension belongs to takes part in as many products as the other dimensions have.
    side = "act" if getattr(layer, "transposed", False) else "grad"
    work = math.prod(shapes[side]) * math.prod(shapes["weight"][1:])
    return LayerSize(shapes, along(product.equation), work, 8 * weight.itemsize)


class Charge(NamedTuple):
    """The cost of a layer: the sum of all elements or multiply-adds, each times its cost, and their number."""

    amount: float
    units: int


def tensor_of(point: str) -> str:
    """The tensor that a point rounds, by the name of its first point.

    Example:
        >>> tensor_of("act_bwd"), tensor_of("grad_w")
        ('act', 'grad')
    """
    return point.removesuffix("_bwd").removesuffix("_w")


def bits_of(points: FivePoint, point: str, size: LayerSize) -> float:
    """The bits per element at a point, with those of its scales.

    Example:
        >>> import qsim
        >>> from qsim.nn.product.along import along
        >>> size = LayerSize({"act": (64, 64)}, along("...mk,nk->mn"), 0, 32)
        >>> [bits_of(qsim.FivePoint(act=name), "act", size) for name in ("mxfp4", "nvfp4", "e5m2", None)]
        [4.25, 4.5, 8.0, 32.0]
    """
    quantizer = quantizer_at(points, point)
    if quantizer is None:
        return float(size.bits)
    if quantizer.scale is None:
        return float(quantizer.format.bits)
    tiles, elements = size.along[point].tiles(quantizer.scale, size.shapes[tensor_of(point)]), size.elements(point)
    return quantizer.format.bits + quantizer.scale.format.bits * math.prod(tiles.counts(elements)) / elements


def bits_of_tensor(points: FivePoint, tensor: str, size: LayerSize) -> float:
    """The bits per element of a tensor, the mean of the two products that take it."""
    names = [name for operands in PRODUCTS for name in operands if tensor_of(name) == tensor]
    return sum(bits_of(points, name, size) for name in names) / len(names)


def quantizer_at(points: FivePoint, point: str) -> Quantizer | None:
    """The quantizer at a point; at `grad_w`, that of `grad` unless it has its own.

    Raises:
        TypeError: If a callable rounds there, whose bits are not known.
    """
    used = points.used["grad" if point == "grad_w" and points.grad_w is None else point]
    if used is None or isinstance(used, Quantizer):
        return used
    raise TypeError(f"assign: {point} is rounded by {used.name}, and the bits of a callable are not known: give a format or a Quantizer")


def charge(cost: Cost, points: FivePoint, size: LayerSize) -> Charge:
    """The cost of a layer with some points.

    Args:
        cost: What is counted.
        points: The points.
        size: The size of its work.
    """
    if cost == "bits":
        names = [name for operands in PRODUCTS for name in operands]
        return Charge(sum(size.elements(name) * bits_of(points, name, size) for name in names), sum(map(size.elements, names)))
    each = _time if cost == "time" else _luts
    return Charge(sum(size.multiply_adds * each(points, index, size) for index in range(3)), 3 * size.multiply_adds)


def _time(points: FivePoint, index: int, size: LayerSize) -> float:
    """The time of a multiply-add of one of the three products relative to BF16: that of its wider operand on a matrix unit."""
    quantizers = [quantizer_at(points, point) for point in PRODUCTS[index]]
    widest = max(size.bits if quantizer is None else quantizer.format.bits for quantizer in quantizers)
    return next((width for width in _WIDTHS if widest <= width), widest) / _REFERENCE


def _luts(points: FivePoint, index: int, size: LayerSize) -> float:
    """The lookup tables of a multiply-add of one of the three products, with its accumulator, or with sums in float32."""
    one, other = (quantizer_at(points, point) for point in PRODUCTS[index])
    return luts_of(_element(one), _element(other), points.sums[index] or Rounded(FP32))


def _element(quantizer: Quantizer | None) -> Format:
    return FP32 if quantizer is None else quantizer.format


@lru_cache(maxsize=256)
def luts_of(a: Format, b: Format, accumulator: Accumulator) -> float:
    """The lookup tables of a multiply-add of an FPGA, as Yosys maps it; scales of blocks are not part of it."""
    from qsim.silicon import Dot
    from qsim.silicon.graphs import routine
    from qsim.silicon.printers import systemverilog
    from qsim.silicon.synthesis import fpga

    circuit = Dot(accumulator, a, b)
    return fpga(systemverilog.module(routine(circuit), 0, False), circuit.name).luts / circuit.length
