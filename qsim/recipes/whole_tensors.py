"""8-bit recipes with scales per tensor, row or square tile."""

from __future__ import annotations

from dataclasses import replace

from qsim import scaling
from qsim.accumulators import Rounded
from qsim.formats import E4M3, E4M3B11FNUZ, E5M2, Float, Int
from qsim.formats.base import check_flag
from qsim.functional.quantizer import Quantizer
from qsim.recipes.five_point import FivePoint
from qsim.recipes.recipe import Recipe
from qsim.scaling import PerRow, PerTensor, Scaling
from qsim.scaling.block_formats import FP8_1X128, FP8_128X128


def fp8_hybrid(scale: Scaling | str | None = None) -> Recipe:
    """E4M3 for inputs and weights, which need precision, and E5M2 for gradients, which need range.

    With one scale per tensor the backward pass reuses the tensors that the forward pass rounded. With one scale per row, `PerRow()`,
    operands are rounded again for each product, because rows follow the dimension that a product sums over.

    Args:
        scale: The scale of every point: `PerTensor()`, the default; `Delayed(…)`; `PerRow()`; or the `repr` of one.

    Example:
        >>> import qsim
        >>> print(qsim.recipes.fp8_hybrid())
        fp8_hybrid: act=e4m3 tensor, weight=e4m3 tensor, grad=e5m2 tensor
    """
    chosen = scaling.resolve(scale) or PerTensor()
    operand, gradient = Quantizer(E4M3, scale=chosen), Quantizer(E5M2, scale=chosen)
    back = operand if chosen.is_directed else "same"
    points = FivePoint(operand, operand, act_bwd=back, weight_bwd=back, grad=gradient)
    return Recipe("fp8_hybrid", points, source="Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433")


def torchao_rowwise(*, weight_gradient: bool = True) -> Recipe:
    """E4M3 everywhere, gradients included, with a power of two per row or column, rounded up: nothing saturates.

    Rows follow the dimension that a product sums over, so each operand is rounded again for its other product.

    Args:
        weight_gradient: Whether the weight's gradient is a product of rounded operands, as in torchao's configuration `"rowwise"`. If not,
            as in `"rowwise_with_gw_hp"`, that product is in high precision, and the weight has one scale in the other backward product.

    Example:
        >>> import qsim
        >>> print(qsim.recipes.torchao_rowwise().points.grad.scale)
        rows(e8m0, ceil)
    """
    check_flag("torchao_rowwise", "weight_gradient", weight_gradient)
    rows = Quantizer(E4M3, scale=PerRow(format="e8m0", rule="ceil"))
    if weight_gradient:
        points = FivePoint(rows, rows, act_bwd=rows, weight_bwd=rows, grad=rows)
    else:
        whole = Quantizer(E4M3, scale=PerTensor("e8m0", "ceil"))
        points = FivePoint(rows, rows, act_bwd=None, weight_bwd=whole, grad=rows, grad_w="fp32")
    return Recipe("torchao_rowwise", points, source="torchao 0.18, torchao.float8.Float8LinearConfig.from_recipe_name")


def fp8_blockwise() -> Recipe:
    """E4M3 everywhere: inputs and gradients in blocks of 128 along the summed dimension, weights in tiles of 128 × 128.

    A square tile is the same in both directions, so the backward pass reuses the forward pass's weight. Scales are powers of two, rounded
    up: nothing saturates, and a value times its scale still has E4M3's four significant bits, so that the products of bfloat16 tensor
    cores are exact. (The paper takes such scales for some layers' inputs and float32 ones elsewhere.)

    The last layer stays in high precision. The paper leaves out the output head, embeddings and the products of attention; the latter two
    are not converted anyway.

    Example:
        >>> import qsim
        >>> print(qsim.recipes.fp8_blockwise())
        fp8_blockwise: act=fp8_1x128, weight=fp8_128x128, act_bwd=fp8_1x128, grad=fp8_1x128; high precision: the last layer
    """
    points = FivePoint(FP8_1X128, FP8_128X128, act_bwd=FP8_1X128, weight_bwd="same", grad=FP8_1X128)
    return Recipe("fp8_blockwise", points, last=1, source="DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv 2412.19437")


def deepseek_v3() -> Recipe:
    """`fp8_blockwise` with the sums of the paper: an H100's, promoted every 128 products, where scales enter in float32.

    The sum of 128 products of E4M3 numbers comes from the matrix unit. It is multiplied by the scales of both operands, which do not
    change within it, and added in float32. (Scales are powers of two everywhere, see `fp8_blockwise`; the paper has float32 ones in most
    places.) Convolutions are refused, because scales change within their sums: exclude them.

    Example:
        >>> import qsim
        >>> print(qsim.recipes.deepseek_v3().points.accumulate)
        Promoted('h100_fp8', 128)
    """
    recipe = fp8_blockwise().with_(accumulate="h100_fp8_promoted")
    return replace(recipe, name="deepseek_v3", source=f"{recipe.source}, section 3.3")


def hfp8(*, chunk: int | None = None) -> Recipe:
    """IBM's hybrid: E4M3 moved by a factor of 2⁻⁴ forward, E5M2 for gradients; the first and the last layer in high precision.

    There are no scales: the paper's bias of 4 comes on top of E4M3's own 7 and moves its range to the magnitudes of weights and
    activations, 2⁻¹³ to 30. That is `float8_e4m3b11fnuz` of XLA and ml_dtypes, which cite the paper for it. Scale gradients with the loss,
    by hand or with a `torch.amp.GradScaler`, which notices when E5M2 overflows.

    Args:
        chunk: Number of products whose sum is added to the running sum in FP16 with six exponent bits; 64 in the paper. `None` adds in
            float32. Sums within a chunk are those of a matrix unit, see `qsim.accumulators.Rounded`; the paper's are in that FP16, too.

    Example:
        >>> import qsim
        >>> recipe = qsim.recipes.hfp8(chunk=64)
        >>> print(recipe.points.act.format, recipe.first, recipe.last, recipe.points.accumulate)
        Float(4, 3, bias=11, specials='fnuz') 1 1 Rounded('Float(6, 9)', chunk=64)
    """
    sums = None if chunk is None else Rounded("e6m9", chunk=chunk)
    points = FivePoint(E4M3B11FNUZ, E4M3B11FNUZ, act_bwd="same", weight_bwd="same", grad=E5M2, accumulate=sums)
    source = "Sun et al., Hybrid 8-bit Floating Point Training and Inference, NeurIPS 2019"
    return Recipe("hfp8", points, first=1, last=1, source=source)


def int8() -> Recipe:
    """Integers from -127 to 127 with one scale per row, that is per sum of a product; gradients are rounded stochastically.

    -128 is left out: the largest magnitude of a row becomes 127 with either sign, and rounding is symmetric about zero.

    Example:
        >>> import qsim
        >>> points = qsim.recipes.int8().points
        >>> print(points.weight.format, points.weight.scale, points.grad.rounding)
        Int(8, symmetric=True) rows Stochastic()
    """
    integers = Int(8, symmetric=True)
    nearest, noisy = Quantizer(integers, scale=PerRow()), Quantizer(integers, "stochastic", scale=PerRow())
    points = FivePoint(nearest, nearest, act_bwd=nearest, weight_bwd=nearest, grad=noisy)
    source = "after Chen et al., A Statistical Framework for Low-bitwidth Training of Deep Neural Networks, arXiv 2010.14298"
    return Recipe("int8", points, source=source)


def luq() -> Recipe:
    """INT4 for inputs and weights, and powers of two in 4 bits for gradients, whose rounding and underflow are unbiased.

    A gradient becomes zero or one of seven powers of two, the largest of them the largest magnitude of its tensor. Between two of them, and
    between zero and the smallest, it goes to either with the probability that makes the mean exact: what the paper calls stochastic
    underflow and logarithmic stochastic rounding is `Stochastic` here. The backward pass multiplies by the 4-bit inputs and weights.

    The paper clips inputs and weights where normal and Laplacian values have the least error; here their largest magnitudes are kept. In
    a transformer, outliers then leave few of the 15 integers to the other inputs, whose forward rounding is nearly all of the bias of a
    gradient; `PerRow()` scales of inputs and weights remove most of it. The rounding of gradients itself has none. The paper keeps the
    first and the last layer in high precision, takes a gradient's largest magnitude from earlier steps (`scale=Delayed(…)`), and may
    average several drawings.

    Example:
        >>> import torch, qsim
        >>> gradient = qsim.recipes.luq().points.grad
        >>> gradient.format.values()[-7:]
        (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
        >>> gradient(torch.tensor([16.0, 0.5, 0.0]))
        tensor([16.0000,  0.5000,  0.0000])
    """
    operand = Quantizer(Int(4, symmetric=True), scale=PerTensor())
    grad = Quantizer(Float(3, 0), "stochastic", scale=PerTensor(rule="ceil"))
    points = FivePoint(operand, operand, act_bwd="same", weight_bwd="same", grad=grad)
    source = "Chmiel et al., Accurate Neural Training with 4-bit Matrix Multiplications at Standard Formats, arXiv 2112.10769"
    return Recipe("luq", points, first=1, last=1, source=source)
