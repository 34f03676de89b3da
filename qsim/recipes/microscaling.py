"""Recipes with scales per block of 16 or 32 along the dimension that a product sums over: OCP's MX formats and NVIDIA's NVFP4."""

from __future__ import annotations

from qsim import scaling
from qsim.formats import E2M1, E4M3, Float
from qsim.functional.hadamard import Hadamard
from qsim.functional.quantizer import Quantizer
from qsim.points import Rotated, TransformerEngineNVFP4
from qsim.points.transformer_engine import SIGNS
from qsim.recipes.five_point import FivePoint
from qsim.recipes.recipe import Recipe
from qsim.recipes.spec import Spec
from qsim.scaling import PerTensor, PerTile
from qsim.scaling.block_formats import MXFP6_E3M2, NVFP4, Block

_NVFP4 = "NVIDIA, Pretraining Large Language Models with NVFP4, arXiv 2509.25149"


def mxfp8() -> Recipe:
    """E4M3 for everything, including gradients, in blocks of 32 with power-of-two scales that are rounded up.

    OCP's own rule takes the floor, so that the largest elements of a block may saturate: the paper saw training diverge that way. Every
    operand is rounded along the dimension that its product sums over, so each is rounded twice.

    Example:
        >>> import qsim
        >>> qsim.recipes.mxfp8().points.grad.scale
        PerBlock(size=32, dim=-1, format='e8m0', rule='ceil')
    """
    block = Block(E4M3, 32, rule="ceil")
    points = FivePoint(block, block, act_bwd=block, weight_bwd=block, grad=block)
    return Recipe("mxfp8", points, source="Mishra et al., Recipes for Pre-training LLMs with MXFP8, arXiv 2506.08027")


def mxfp6(forward: Spec | None = "mxfp6") -> Recipe:
    """E3M2 in blocks of 32 with OCP's rule for scales: the format that the name `"mxfp6"` means, too.

    OCP's other 6-bit format, E2M3, has more precision and less range: `mxfp6("mxfp6_e2m3")` rounds inputs and weights to it, and leaves
    E3M2 to the backward pass. With OCP's rule the largest elements of a block may saturate.

    Args:
        forward: The format to which inputs and weights are rounded in the forward pass. `None` keeps them in high precision.

    Example:
        >>> import qsim
        >>> print(qsim.recipes.mxfp6("mxfp6_e2m3"))
        mxfp6: act=mxfp6_e2m3, weight=mxfp6_e2m3, act_bwd=mxfp6, weight_bwd=mxfp6, grad=mxfp6
    """
    points = FivePoint(forward, forward, act_bwd=MXFP6_E3M2, weight_bwd=MXFP6_E3M2, grad=MXFP6_E3M2)
    return Recipe("mxfp6", points, source="Rouhani et al., Microscaling Data Formats for Deep Learning, arXiv 2310.10537")


def mxfp4(forward: Spec | None = "mxfp4") -> Recipe:
    """FP4 in blocks of 32, with unbiased gradients: both backward products stochastic, after a Hadamard transform of 32.

    The transform spreads outliers over their blocks, which keeps the noise of stochastic rounding small. Scales of stochastically rounded
    operands are rounded up: nothing saturates, so that the mean over the noise is the product of the unrounded operands. (The paper
    achieves the same by scaling with 3/4 under OCP's rule.)

    Args:
        forward: The format to which inputs and weights are rounded in the forward pass, with round-to-nearest. `None` keeps them in high
            precision, as the paper does.

    Example:
        >>> import qsim
        >>> qsim.recipes.mxfp4(forward=None).points.act is None
        True
    """
    noisy = Quantizer(Block(E2M1, 32, rule="ceil"), "stochastic", transform=Hadamard(32))
    points = FivePoint(forward, forward, act_bwd=noisy, weight_bwd=noisy, grad=noisy)
    return Recipe("mxfp4", points, source="Tseng et al., Training LLMs with MXFP4, arXiv 2502.20586")


def nvfp4(*, outer: PerTensor | str | None = None) -> Recipe:
    """FP4 in blocks of 16 with E4M3 scales and one scale per tensor; weights in tiles of 16 × 16, gradients stochastic.

    A square tile is the same in both directions, so that the backward pass reuses the rounded weight of the forward pass. Both operands of
    ∇W go through a Hadamard transform of 16; inputs are rounded to nearest there, too. So the mean of ∇A over the noise is the product of
    the unrounded gradient and the rounded weight, and that of ∇W the product with the rounded input. For this the gradients' scales are
    rounded up: with round-to-nearest, as at the other points, E4M3 scales may be up to 1/16 too small, and the largest elements of their
    blocks saturate.

    The last layer stays in high precision. The paper leaves out about 15 % of the linear layers, most of them at the end: `with_(last=4)`
    leaves out four.

    Args:
        outer: The scale of each whole weight: `PerTensor()`, the default, or another `PerTensor`, or the `repr` of one. Servers compute
            several layers in one product, such as the projections of queries, keys and values, with one such scale for all of them.
            `PerTensor("e8m0", "ceil")` gives powers of two, which `qsim.export` can make equal without changing a weight.

    Example:
        >>> import qsim
        >>> points = qsim.recipes.nvfp4().points
        >>> points.weight.scale.extent((64, 64)), points.grad.rounding, points.grad_w.transform.size
        ((16, 16), Stochastic(), 16)
    """
    whole = scaling.resolve(outer) or PerTensor()
    if not isinstance(whole, PerTensor):
        raise TypeError(f"nvfp4: outer must be a qsim.scaling.PerTensor or the repr of one, got {outer!r}")
    weight = Block(E2M1, (16, 16), scale=E4M3, rule="fit", outer=whole)
    unsaturated = Block(E2M1, 16, scale=E4M3, rule="ceil", outer=PerTensor(rule="ceil"))
    transformed = Quantizer(NVFP4, transform=Hadamard(16))
    grad, grad_w = (Quantizer(unsaturated, "stochastic", transform=transform) for transform in (None, Hadamard(16)))
    points = FivePoint(NVFP4, weight, act_bwd=transformed, weight_bwd="same", grad=grad, grad_w=grad_w)
    return Recipe("nvfp4", points, last=1, source=_NVFP4)


def te_nvfp4() -> Recipe:
    """NVFP4 with the bits of Transformer Engine: its order of operations, and its signs of the Hadamard transform.

    The points are those of `nvfp4`, except that the scales of gradients are rounded to nearest as the others, so that the largest elements
    of their blocks may saturate.

    Example:
        >>> import qsim
        >>> print(qsim.recipes.te_nvfp4().points.grad)
        TransformerEngineNVFP4(rounding='stochastic')
    """
    nearest, weight = TransformerEngineNVFP4(), TransformerEngineNVFP4(PerTile(16, 16))
    noisy, signs = TransformerEngineNVFP4(rounding="stochastic"), Hadamard(16, seed=SIGNS)
    points = FivePoint(nearest, weight, act_bwd=Rotated(nearest, signs), weight_bwd="same", grad=noisy, grad_w=Rotated(noisy, signs))
    return Recipe("te_nvfp4", points, last=1, source=f"{_NVFP4}; Transformer Engine's NVFP4QuantizerRef")


def ufp4() -> Recipe:
    """Evenly spaced 4-bit values in blocks of 16, with Hadamard transforms in all products; only gradients are stochastic.

    E1M2 has the values 0, 0.5, … 3.5: unlike E2M1's, their rounding to nearest does not shrink what the transform has spread. All six
    operands are transformed in blocks of 16 along the dimension that their product sums over, so each is rounded again for its other
    product. As in `nvfp4`, the scales of gradients are rounded up, so that nothing saturates and their mean is exact.

    Which grid, transforms and rounding are the paper's. Blocks of 16 with E4M3 scales under one of the tensor are those of NVFP4.

    Example:
        >>> import qsim
        >>> points = qsim.recipes.ufp4().points
        >>> points.act.format.values()[-4:], points.act.transform.size, points.act.rounding, points.grad.rounding
        ((2.0, 2.5, 3.0, 3.5), 16, NEAREST, Stochastic())
    """
    uniform, transform = Float(1, 2), Hadamard(16)
    nearest = Quantizer(Block(uniform, 16, scale=E4M3, rule="fit", outer=PerTensor()), transform=transform)
    noisy = Quantizer(Block(uniform, 16, scale=E4M3, rule="ceil", outer=PerTensor(rule="ceil")), "stochastic", transform=transform)
    points = FivePoint(nearest, nearest, act_bwd=nearest, weight_bwd=nearest, grad=noisy)
    source = "Zhao et al., Rethinking Shrinkage Bias in LLM FP4 Pretraining, arXiv 2606.20381"
    return Recipe("ufp4", points, source=source)
