"""Ready settings for whole models, by the names of the papers and formats that they come from.

Example:
    >>> import torch, qsim
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 10))
    >>> _ = qsim.convert(model, qsim.recipes.mxfp8())
    >>> model[0].points.grad.scale
    Blocks(size=32, dim=-1, format='e8m0', rule='ceil')
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable

import torch

from qsim import scaling
from qsim.block import FP8_1X128, FP8_128X128, MXFP6_E2M3, MXFP6_E3M2, NVFP4, Block
from qsim.calls import read_call
from qsim.five_point import FivePoint
from qsim.formats import E2M1, E4M3, E5M2, Float, Format, Int, format as resolve_format
from qsim.quantizer import Quantizer
from qsim.recipe import Recipe
from qsim.scaling import Channel, Scaling, Tensor
from qsim.transforms import Hadamard

__all__ = [
    "NAMED",
    "describe",
    "fp8_blockwise",
    "fp8_hybrid",
    "hfp8",
    "int8",
    "listing",
    "mxfp4",
    "mxfp6",
    "mxfp8",
    "nearest_everywhere",
    "nvfp4",
    "resolve",
    "stochastic_backward",
    "weight_only",
]

#: A format, with or without blocks.
Spec = str | torch.dtype | Format | Block


def fp8_hybrid(scale: Scaling | str | None = None) -> Recipe:
    """E4M3 for inputs and weights, which need precision, and E5M2 for gradients, which need range.

    Under one scale for each tensor the backward pass takes what the forward pass rounded. Scales of rows, `Channel(0)`, lie along what a
    product sums over, so that for each product its operands are rounded anew.

    Args:
        scale: That of every point: `Tensor()`, which is what stands for `None`; `Delayed(…)`; `Channel(0)`; or the text of one.

    Example:
        >>> import qsim
        >>> print(qsim.recipes.fp8_hybrid())
        fp8_hybrid: act=e4m3 tensor, weight=e4m3 tensor, act_bwd=same, weight_bwd=same, grad=e5m2 tensor
    """
    chosen = scaling.resolve(scale) or Tensor()
    operand, gradient = Quantizer(E4M3, scale=chosen), Quantizer(E5M2, scale=chosen)
    back = operand if chosen.is_directed else "same"
    points = FivePoint(operand, operand, back, back, gradient)
    return Recipe("fp8_hybrid", points, source="Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433")


def fp8_blockwise(last: int = 1) -> Recipe:
    """E4M3 everywhere: inputs and gradients in blocks of 128 along what is summed, weights in tiles of 128 × 128.

    A square tile is the same in both directions, so the backward pass takes the forward pass's weight. Scales are powers of two, rounded
    up: nothing saturates, and a value times its scale still has E4M3's four significant bits, so that the products of bfloat16 tensor
    cores are exact. (The paper takes such scales for some layers' inputs and float32 ones elsewhere.)

    Args:
        last: How many of the last layers are left in high precision: the paper leaves the output head, and embeddings and attention's own
            products, which are not converted anyway.

    Example:
        >>> import qsim
        >>> print(qsim.recipes.fp8_blockwise())
        fp8_blockwise: act=fp8_1x128, weight=fp8_128x128, act_bwd=fp8_1x128, weight_bwd=same, grad=fp8_1x128; high precision: the last layer
    """
    points = FivePoint(FP8_1X128, FP8_128X128, FP8_1X128, "same", FP8_1X128)
    return Recipe("fp8_blockwise", points, last=last, source="DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv 2412.19437")


def hfp8() -> Recipe:
    """IBM's hybrid: four exponent bits with a bias of 4 forward, five for gradients; the first and the last layer in high precision.

    There are no scales: the bias is what moves E4M3's range to where inputs and weights are. Gradients are to be scaled with the loss.

    Example:
        >>> import qsim
        >>> recipe = qsim.recipes.hfp8()
        >>> print(recipe.points.act.format, recipe.first, recipe.last)
        Float(4, 3, bias=4) 1 1
    """
    operand = Float(4, 3, bias=4)
    points = FivePoint(operand, operand, "same", "same", E5M2)
    source = "Sun et al., Hybrid 8-bit Floating Point Training and Inference, NeurIPS 2019"
    return Recipe("hfp8", points, first=1, last=1, source=source)


def mxfp8() -> Recipe:
    """E4M3 for everything, gradients too, in blocks of 32 under powers of two that are rounded up.

    OCP's own rule takes the floor, under which the largest elements of a block may saturate: the paper saw training diverge that way.
    Every operand is rounded along what its product sums over, so each of them twice.

    Example:
        >>> import qsim
        >>> qsim.recipes.mxfp8().points.grad.scale
        Blocks(size=32, dim=-1, format='e8m0', rule='ceil')
    """
    block = Block(E4M3, 32, rule="ceil")
    points = FivePoint(block, block, block, block, block)
    return Recipe("mxfp8", points, source="Mishra et al., Recipes for Pre-training LLMs with MXFP8, arXiv 2506.08027")


def mxfp6() -> Recipe:
    """OCP's two 6-bit formats in blocks of 32 with OCP's rule for scales: E2M3 forward, E3M2 backward.

    Precision goes where values are, range where gradients are; which of the two formats stands where is this recipe's choice. Under OCP's
    rule the largest elements of a block may saturate.

    Example:
        >>> import qsim
        >>> print(qsim.recipes.mxfp6())
        mxfp6: act=mxfp6_e2m3, weight=mxfp6_e2m3, act_bwd=mxfp6, weight_bwd=mxfp6, grad=mxfp6
    """
    points = FivePoint(MXFP6_E2M3, MXFP6_E2M3, MXFP6_E3M2, MXFP6_E3M2, MXFP6_E3M2)
    return Recipe("mxfp6", points, source="Rouhani et al., Microscaling Data Formats for Deep Learning, arXiv 2310.10537")


def mxfp4(forward: Spec | None = "mxfp4") -> Recipe:
    """FP4 in blocks of 32, with unbiased gradients: both backward products stochastic, behind a Hadamard transform of 32.

    The transform spreads what stands out over its block, which is what makes the noise of stochastic rounding small. Scales of what is
    rounded stochastically are rounded up: nothing saturates, so that the mean over the noise is the product of the unrounded operands.
    (The paper comes to the same by scaling with 3/4 under OCP's rule.)

    Args:
        forward: The format to which inputs and weights are rounded on the way forward, to nearest. `None` keeps that in high precision,
            as the paper does.

    Example:
        >>> import qsim
        >>> qsim.recipes.mxfp4(forward=None).points.act is None
        True
    """
    noisy = Quantizer(Block(E2M1, 32, rule="ceil"), "stochastic", transform=Hadamard(32))
    points = FivePoint(forward, forward, noisy, noisy, noisy)
    return Recipe("mxfp4", points, source="Tseng et al., Training LLMs with MXFP4, arXiv 2502.20586")


def nvfp4(last: int = 1) -> Recipe:
    """FP4 in blocks of 16 under E4M3 scales, under one scale of the tensor; weights in tiles of 16 × 16, gradients stochastic.

    A square tile is the same in both directions, so that the backward pass takes the very weight of the forward pass. Both operands of
    ∇W go through a Hadamard transform of 16; inputs are rounded to nearest there too. So the mean of ∇A over the noise is what the rounded
    weight makes of the unrounded gradient, and that of ∇W what the rounded input does. For this the gradients' scales are rounded up: to
    nearest, which the other points keep, E4M3 scales may be up to 1/16 too small, and the largest elements of their blocks saturate.

    Args:
        last: How many of the last layers are left in high precision. The paper leaves about 15 % of the linear ones, most of them at the
            end.

    Example:
        >>> import qsim
        >>> points = qsim.recipes.nvfp4().points
        >>> points.weight.scale.extent((64, 64)), points.grad.rounding, points.grad_w.transform.size
        ((16, 16), Stochastic(), 16)
    """
    weight = Block(E2M1, (16, 16), scale=E4M3, rule="fit", outer=Tensor())
    unsaturated = Block(E2M1, 16, scale=E4M3, rule="ceil", outer=Tensor(rule="ceil"))
    turned = Quantizer(NVFP4, transform=Hadamard(16))
    grad, grad_w = (Quantizer(unsaturated, "stochastic", transform=transform) for transform in (None, Hadamard(16)))
    points = FivePoint(NVFP4, weight, turned, "same", grad, grad_w)
    return Recipe("nvfp4", points, last=last, source="NVIDIA, Pretraining Large Language Models with NVFP4, arXiv 2509.25149")


def int8() -> Recipe:
    """Integers from -127 to 127 with a scale for each row, that is for each sum of a product; gradients are rounded stochastically.

    -128 is left out: the largest magnitude of a row lands on 127 with either sign, and no number is rounded otherwise than its negative.

    Example:
        >>> import qsim
        >>> points = qsim.recipes.int8().points
        >>> print(points.weight.format, points.weight.scale, points.grad.rounding)
        Int(8, symmetric=True) channel Stochastic()
    """
    integers = Int(8, symmetric=True)
    nearest, noisy = Quantizer(integers, scale=Channel(0)), Quantizer(integers, "stochastic", scale=Channel(0))
    points = FivePoint(nearest, nearest, nearest, nearest, noisy)
    source = "after Chen et al., A Statistical Framework for Low-bitwidth Training of Deep Neural Networks, arXiv 2010.14298"
    return Recipe("int8", points, source=source)


def stochastic_backward(format: Spec) -> Recipe:
    """Inputs in full precision forward; the weight rounded to nearest, once for both passes; backward the rest stochastically.

    So the gradients are, in the mean over the noise, those of the loss at the rounded weight.

    Args:
        format: Of all that is rounded. Its scales, if it has any, must be those of square tiles, for the weight's sake.

    Example:
        >>> import qsim
        >>> qsim.recipes.stochastic_backward("e4m1").points.grad.rounding
        Stochastic()
    """
    noisy = Quantizer(format, "stochastic")
    points = FivePoint(None, format, noisy, "same", noisy)
    return Recipe("stochastic_backward", points, source=_FEWER_BITS.format("Figure 3"))


def weight_only(format: Spec) -> Recipe:
    """The weight alone is rounded, to nearest, once for both passes.

    Args:
        format: The weight's. Its scales, if it has any, must be those of square tiles.

    Example:
        >>> import qsim
        >>> print(qsim.recipes.weight_only("e4m1"))
        weight_only: weight=Float(4, 1), weight_bwd=same
    """
    return Recipe("weight_only", FivePoint(weight=format, weight_bwd="same"), source=_FEWER_BITS.format("section 3.2"))


def nearest_everywhere(format: Spec) -> Recipe:
    """All five points rounded to nearest: what gradients are biased under.

    Args:
        format: That of all points.

    Example:
        >>> import qsim
        >>> print(qsim.recipes.nearest_everywhere("e4m1"))
        nearest_everywhere: act=Float(4, 1), weight=Float(4, 1), act_bwd=Float(4, 1), weight_bwd=Float(4, 1), grad=Float(4, 1)
    """
    points = FivePoint(format, format, format, format, format)
    return Recipe("nearest_everywhere", points, source=_FEWER_BITS.format("section 3.1"))


_FEWER_BITS = "Training with Fewer Bits, {}"

#: Every recipe by its name.
NAMED: dict[str, Callable[..., Recipe]] = {
    function.__name__: function
    for function in (
        fp8_hybrid,
        fp8_blockwise,
        hfp8,
        mxfp8,
        mxfp6,
        mxfp4,
        nvfp4,
        int8,
        stochastic_backward,
        weight_only,
        nearest_everywhere,
    )
}
#: What people may mean by names that tell a width alone.
_FAMILIES = {"fp8": "fp8_hybrid", "fp4": "mxfp4", "fp6": "mxfp6", "mx": "mxfp8"}
#: The format in which a recipe is shown that is for any format.
SHOWN_IN = "e4m3"


def resolve(name: str, format: Spec | None = None) -> Recipe:
    """A recipe by its name, or by the call that makes it.

    Args:
        name: For example `"mxfp4"` or `"nvfp4(last=4)"`.
        format: That of a recipe for any format if its name stands alone.

    Raises:
        TypeError: If it is no text.
        ValueError: If no recipe has that name, or it lacks its format.

    Example:
        >>> import qsim
        >>> qsim.recipes.resolve("nvfp4(last=4)").last
        4
    """
    if not isinstance(name, str):
        raise TypeError(f"a recipe's name must be a text, got {name!r}")
    if name in NAMED:
        make = NAMED[name]
        if not _needs_format(make):
            return make()
        if format is None:
            raise ValueError(f"the recipe {name} is for any format: say which, as in {name}('e4m3')")
        return make(format)
    found: Recipe | None = read_call(name, NAMED)
    if found is not None:
        return found
    close = [_FAMILIES[name]] if name in _FAMILIES else difflib.get_close_matches(name.partition("(")[0], NAMED, n=1)
    hint = f"did you mean {close[0]!r}? There are" if close else "there are"
    raise ValueError(f"unknown recipe {name!r}: {hint} {', '.join(NAMED)}{_instead(name)}")


def _instead(name: str) -> str:
    """What to say to who gives a format, which does not tell where to round."""
    try:
        resolve_format(name)
    except ValueError:
        return ""
    return f". {name!r} is a format: FivePoint(act={name!r}, weight={name!r}) rounds inputs and weights to it"


def listing() -> str:
    """All recipes, each with what it is.

    Example:
        >>> import qsim
        >>> print(qsim.recipes.listing().splitlines()[0])
        fp8_hybrid                   E4M3 for inputs and weights, which need precision, and E5M2 for gradients, which need range
    """
    calls = {f"{name}(format)" if _needs_format(make) else name: make for name, make in NAMED.items()}
    width = max(map(len, calls))
    return "\n".join(f"{call:<{width}}  {_summary(make)}" for call, make in calls.items())


def describe(name: str | Recipe | None = None) -> None:
    """Prints a recipe's points, with formats, scales and roundings, what it keeps in high precision, and its source.

    Args:
        name: A recipe, its name, or the call that makes it; a recipe for any format is shown in E4M3. Without one all recipes are listed.

    Raises:
        ValueError: If no recipe has that name.

    Example:
        >>> import qsim
        >>> qsim.recipes.describe("weight_only('e4m1')")
        weight_only
          point       format          scale  rounding  after
          act         high precision
          weight      Float(4, 1)     -      nearest   -
          act_bwd     high precision
          weight_bwd  same as weight
          grad        high precision
          high precision: no layer
          source: Training with Fewer Bits, section 3.2
    """
    if name is None:
        print(listing())
    else:
        print((name if isinstance(name, Recipe) else resolve(name, SHOWN_IN)).describe())


def _needs_format(make: Callable[..., Recipe]) -> bool:
    return any(parameter.default is parameter.empty for parameter in inspect.signature(make).parameters.values())


def _summary(make: Callable[..., Recipe]) -> str:
    assert make.__doc__ is not None
    return make.__doc__.partition("\n")[0].rstrip(".")
