"""Recipes of 2025 and 2026 in FP4 whose scales need more than a rule: chosen by error, corrected, nested, or per token."""

from __future__ import annotations

from qsim.formats import E2M1, E4M3, E5M2
from qsim.formats.base import check_flag
from qsim.functional.hadamard import Hadamard
from qsim.functional.quantizer import Quantizer
from qsim.points import DGE, Clamped, FourOverSix, MSEden, OuterScale, Outliers, Rotated
from qsim.points.four_over_six import Error
from qsim.recipes.five_point import FivePoint
from qsim.recipes.recipe import Recipe
from qsim.recipes.spec import Spec
from qsim.scaling import PerBlock, PerRow, PerTensor, PerTile
from qsim.scaling.block_formats import Block


def four_over_six(*, error: Error = "mse", reach: float = 256.0) -> Recipe:
    """NVFP4 with the better of two scales for each block, under which its largest magnitude becomes 6 or 4; gradients stochastic.

    The rest is that of `nvfp4`: weights in tiles of 16 × 16, both operands of ∇W after a Hadamard transform of 16, the last layer in high
    precision. Gradients choose between scales as well, by the errors that were drawn, as in the authors' code; this biases them a little.

    Args:
        error: `"mse"` as the authors' code, or `"mae"`, Transformer Engine's default.
        reach: What the largest block's scale becomes: 256, or 448 as in NVFP4, which leaves the largest blocks one choice.

    Example:
        >>> import qsim
        >>> points = qsim.recipes.four_over_six(error="mae").points
        >>> print(points.act, points.grad)
        FourOverSix() FourOverSix(rounding='stochastic')
    """
    forward, weight = FourOverSix(error=error, reach=reach), FourOverSix(PerTile(16, 16), error=error, reach=reach)
    grad = FourOverSix(error=error, reach=reach, rounding="stochastic")
    act_bwd, grad_w = (Rotated(point, Hadamard(16)) for point in (forward, grad))
    points = FivePoint(forward, weight, act_bwd=act_bwd, weight_bwd="same", grad=grad, grad_w=grad_w)
    return Recipe("four_over_six", points, last=1, source="Cook et al., Four Over Six, arXiv 2512.02010")


def ms_eden(forward: Spec | None = None, *, size: int = 32) -> Recipe:
    """Gradients by MS-EDEN: nearest FP4 elements after a Hadamard transform, and scales that make their mean exact.

    All four operands of the backward products are rotated along the dimension that their product sums over, with signs that both operands
    of a product share and that every pass draws again.

    Args:
        forward: The format to which inputs and weights are rounded in the forward pass. `None` keeps them in high precision.
        size: Elements of a block of the transform, and of those that share a correction: 32 in the authors' research code, 128 in their
            kernels.

    Example:
        >>> import qsim
        >>> print(qsim.recipes.ms_eden("nvfp4").points.grad)
        Rotated(MSEden(), Hadamard(size=32, random_signs=True, seed=0), 'call')
    """
    eden = _eden(size)
    points = FivePoint(forward, forward, eden, act_bwd=eden, weight_bwd=eden)
    return Recipe("ms_eden", points, source=_QUARTET)


def quartet2(*, size: int = 32) -> Recipe:
    """Quartet II: four over six forward, and MS-EDEN backward, on what the forward pass rounded.

    Args:
        size: Elements of a block of the backward pass's Hadamard transform: 32 in the authors' research code, 128 in their kernels.

    Example:
        >>> import qsim
        >>> points = qsim.recipes.quartet2().points
        >>> print(points.act, points.backward_of)
        FourOverSix(error='mse') rounded
    """
    forward, eden = FourOverSix(error="mse"), _eden(size)
    points = FivePoint(forward, forward, eden, act_bwd=eden, weight_bwd=eden, backward_of="rounded")
    return Recipe("quartet2", points, source=_QUARTET)


def tetrajet2() -> Recipe:
    """TetraJet-v2's products: NVFP4 blocks under a scale for each 128 elements; stochastic backward, on what the forward pass rounded.

    The backward pass rotates both operands of its products by a Hadamard transform of 16, with signs that they share and that every pass
    draws again. Its scales are rounded up: nothing saturates, so that its mean over the noise is exact. The paper's control of
    oscillations and of outlier channels is `qsim.control.OsciReset` and `OutControl`.

    Example:
        >>> import qsim
        >>> points = qsim.recipes.tetrajet2().points
        >>> points.act.function.granularity, points.grad.function.point.quantizer.rounding
        (PerBlock(size=128, dim=-1, format='fp32', rule='fit'), Stochastic())
    """
    forward = OuterScale(Block(E2M1, 16, scale=E4M3, rule="fit"), PerBlock(128))
    noisy = OuterScale(Quantizer(Block(E2M1, 16, scale=E4M3, rule="ceil"), "stochastic"), PerBlock(128))
    turned = Rotated(noisy, Hadamard(16), redraw="call")
    points = FivePoint(forward, forward, turned, act_bwd=turned, weight_bwd=turned, backward_of="rounded")
    return Recipe("tetrajet2", points, source="Chen et al., TetraJet-v2, arXiv 2510.27527")


def fp4_dge(*, keep_outliers: bool = False) -> Recipe:
    """E2M1 inputs without each token's outliers, E2M1 weights with a surrogate gradient, and E5M2 gradients.

    Inputs have a scale per token, after values beyond the token's quantiles 0.01 and 0.99 are clamped; weights have a scale per input
    channel, and the gradient of a weight is multiplied by the slope of a smooth staircase. This is what MS-AMP's layers do, except that
    they store the results in E4M3 once more.

    Args:
        keep_outliers: Whether what clamping cuts off goes through a second product in high precision, as in the paper. MS-AMP's layers
            drop it.

    Example:
        >>> import qsim
        >>> points = qsim.recipes.fp4_dge().points
        >>> points.act.function.quantile, points.weight.function.k
        (0.99, 5.0)
    """
    check_flag("fp4_dge", "keep_outliers", keep_outliers)
    tokens = Clamped(Quantizer(E2M1, scale=PerRow()))
    # Clamping again changes nothing, and both passes multiply what the module rounded.
    act = Outliers(tokens, tokens.quantile, dim=-1) if keep_outliers else tokens
    weight = DGE(Quantizer(E2M1, scale=PerRow(0)))
    points = FivePoint(act, weight, Quantizer(E5M2, scale=PerTensor()))
    source = "Wang et al., Optimizing Large Language Model Training Using FP4 Quantization, arXiv 2501.17116, and MS-AMP"
    return Recipe("fp4_dge", points, source=source)


_QUARTET = "Panferov et al., Quartet II, arXiv 2601.22813"


def _eden(size: int) -> Rotated:
    return Rotated(MSEden(size), Hadamard(size), redraw="call")
