"""Points with scales: how they are written, which are compatible, and their carriers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer
from qsim.formats import E2M1, E4M3, FP32, Int
from qsim.nn import functional
from qsim.nn.product.along import along
from qsim.nn.product.carriers import ProductCarrier, product_carrier
from qsim.nn.product.sites import Site
from qsim.scaling import PerBlock, PerRow, PerTensor, PerTile
from qsim.transforms import Hadamard
from support.points import in_order

TURNED = Quantizer("nvfp4", transform=Hadamard(16))
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("point", "text"),
    [
        (Quantizer("mxfp4"), "mxfp4"),
        (Quantizer("mxfp8_e5m2", "stochastic"), "mxfp8_e5m2 Stochastic()"),
        (Quantizer("e2m1", scale=PerBlock(32)), "e2m1 blocks(32)"),
        (Quantizer("e2m1", scale=PerBlock(32, 0, format="e8m0", rule="floor")), "mxfp4"),
        (Quantizer("e4m3", scale=PerTensor(margin=1)), "e4m3 tensor(margin=1)"),
        (Quantizer("e2m1", scale=PerTile(16, 16, format="e4m3", outer=PerTensor())), "e2m1 tiles(16, 16, e4m3, under tensor)"),
        (TURNED, "nvfp4 after hadamard(16)"),
    ],
)
def test_tables_show_scales_and_transforms(point: Quantizer, text: str) -> None:
    assert str(FivePoint(act=point, weight=point)) == f"act={text}, weight={text}"


@pytest.mark.parametrize("scale", [PerTensor(), PerTile(16, 16), None])
def test_scales_without_a_direction_can_be_reused(scale: PerTensor | PerTile | None) -> None:
    point = Quantizer("e4m3", scale=scale)
    assert FivePoint(point, point, act_bwd="same", weight_bwd="same", grad=point).weight_bwd == "same"


@pytest.mark.parametrize("point", [Quantizer("mxfp4"), Quantizer("e4m3", scale=PerRow()), Quantizer("e4m3", scale=PerTile(1, 128)), TURNED])
def test_what_follows_a_direction_is_rounded_again(point: Quantizer) -> None:
    x, w, g = torch.randn(32, 32), torch.randn(32, 32), torch.randn(32, 32)
    gradients = []
    for back in ("same", point):
        points = FivePoint(point, point, point, act_bwd=back, weight_bwd=back)
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        gradients.append(torch.autograd.grad(functional.linear(*leaves, points=points), leaves, g))
    assert all(map(torch.equal, *gradients))


OTHER = Quantizer("nvfp4", transform=Hadamard(32))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"act": TURNED}, "act is transformed by .*, and weight, its partner in a product, has no quantizer"),
        ({"weight": TURNED}, "weight is transformed by .*, and act, its partner"),
        ({"act": TURNED, "weight": "nvfp4"}, "act and weight are multiplied and must have the same transform"),
        ({"act": TURNED, "weight": OTHER}, r"got Hadamard\(size=16.* and Hadamard\(size=32"),
        ({"grad": TURNED, "weight_bwd": TURNED}, "grad is transformed by .*, and act_bwd"),
        ({"grad": "e4m3", "grad_w": TURNED, "act_bwd": "e4m3"}, "grad_w and act_bwd"),
        ({"grad": TURNED, "grad_w": TURNED, "act_bwd": TURNED}, "grad is transformed by .*, and weight_bwd"),
        ({"act_bwd": TURNED, "weight_bwd": TURNED}, "and grad, its partner"),
        ({"act_bwd": "same", "grad": TURNED, "weight_bwd": TURNED}, "and act_bwd, its partner"),
    ],
)
def test_partners_have_the_same_transform(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FivePoint(**given)  # type: ignore[arg-type]


def test_transforms_of_one_product_alone() -> None:
    """The operands of that product are rounded after the transform, which cancels; those of the others without it."""
    x, w, g = torch.randn(16, 48), torch.randn(32, 48), torch.randn(16, 32)
    blocks = Quantizer("nvfp4")

    def turned(a: Tensor) -> Tensor:
        return TURNED(a)

    def check(points: FivePoint, y: Tensor, of_x: Tensor, of_w: Tensor) -> None:
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        result = functional.linear(*leaves, points=points)
        for found, expected in zip((result, *torch.autograd.grad(result, leaves, g)), (y, of_x, of_w), strict=True):
            torch.testing.assert_close(found.detach(), expected, rtol=1e-4, atol=1e-4)

    check(
        FivePoint("nvfp4", "nvfp4", act_bwd=TURNED, weight_bwd="nvfp4", grad="nvfp4", grad_w=TURNED),
        blocks(x) @ blocks(w).T,
        blocks(g) @ blocks(w.T).T,
        turned(g.T) @ turned(x.T).T,
    )
    check(FivePoint(act=TURNED, weight=TURNED, act_bwd=None, weight_bwd=None), turned(x) @ turned(w).T, g @ w, g.T @ x)
    check(FivePoint(act_bwd=TURNED, weight_bwd=TURNED, grad=TURNED), x @ w.T, turned(g) @ turned(w.T).T, turned(g.T) @ turned(x.T).T)


X, W = torch.randn(2, 4, 6, 6), torch.randn(4, 2, 3, 3)
ALONG = Quantizer("e4m3", scale=PerRow())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: functional.conv2d(X, W, groups=2, points=FivePoint(weight_bwd=ALONG)), "weight_bwd .*fall into groups"),
        (lambda: functional.conv2d(X, W, groups=2, points=FivePoint(act_bwd=ALONG)), "act_bwd .*fall into groups"),
        (lambda: functional.conv2d(X, W, groups=2, points=FivePoint(TURNED, TURNED, act_bwd=None, weight_bwd=None)), "act has Hadamard"),
        (lambda: functional.conv_transpose2d(X, W, groups=2, points=FivePoint(weight=ALONG, weight_bwd=None)), "weight .*fall into groups"),
        (lambda: functional.conv_transpose2d(X, W, groups=2, points=FivePoint(grad=ALONG)), "grad .*fall into groups"),
        (
            lambda: functional.embedding(torch.tensor([0]), W[0, 0], points=FivePoint(TURNED, TURNED, act_bwd=None, weight_bwd=None)),
            "a lookup is none: weight",
        ),
        (
            lambda: functional.matmul(X, X, FivePoint(weight_bwd=TURNED, grad=TURNED, grad_w="e4m3")),
            "grad is transformed .*act_bwd must be a quantizer, got 'same'",
        ),
    ],
)
def test_unsupported_points_of_an_operation(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_an_input_multiplied_by_a_gradient_has_the_same_transform() -> None:
    """NVFP4's recipe only transforms the operands of ∇W; in attention an input also takes the weight's place for ∇A."""
    wide, turned = Quantizer("fp32"), Quantizer("fp32", transform=Hadamard(4))
    for points in (
        FivePoint(wide, wide, act_bwd=turned, weight_bwd=wide, grad=wide, grad_w=turned),
        FivePoint(wide, wide, act_bwd=wide, weight_bwd=turned, grad=turned, grad_w=wide),
    ):
        a, b = torch.randn(3, 5, 7, requires_grad=True), torch.randn(3, 7, 6, requires_grad=True)
        g = torch.randn(3, 5, 6)
        found = torch.autograd.grad(functional.matmul(a, b, points), (a, b), g)
        for x, y in zip(found, torch.autograd.grad(a @ b, (a, b), g), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_tables_leave_transforms_out() -> None:
    model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 4))
    qsim.convert(model, in_order(*[TURNED] * 5), embeddings=True)
    assert str(model[0].points) == "weight=nvfp4, grad=nvfp4"
    assert model(torch.tensor([[1, 2]])).shape == (1, 2, 4)


def values(fmt: object, **scale: object) -> Site:
    return Site("act", Quantizer(fmt, **scale), 0, along("...mk,nk->mn")["act"], merges=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("point", "on_cuda"),
    [
        (values("mxfp4"), ProductCarrier(torch.bfloat16)),
        (values("mxfp8_e4m3"), ProductCarrier(torch.bfloat16)),
        (values("mxint8"), ProductCarrier(torch.bfloat16)),
        (values("nvfp4"), ProductCarrier(torch.bfloat16)),  # 2 and 4 significant bits
        (values(E4M3, scale=PerBlock(16, format="e4m3")), ProductCarrier(torch.bfloat16)),  # 4 and 4
        (values(E4M3, scale=PerBlock(16, format="e3m4")), ProductCarrier(torch.float32)),  # 4 and 5: TF32 represents them
        (values(E2M1, scale=PerBlock(16)), ProductCarrier(torch.float32, exact=True)),  # 2 and 24
        (values(E4M3, scale=PerTensor()), ProductCarrier(torch.bfloat16)),  # the scale stays outside
        (values(E4M3, scale=PerRow()), ProductCarrier(torch.bfloat16)),
        (values(Int(16), scale=PerTensor()), ProductCarrier(torch.float32, exact=True)),
        (values("fp16", scale=PerTensor()), ProductCarrier(torch.float16)),
        (values("fp16", scale=PerBlock(16, format="e8m0")), ProductCarrier(torch.float32)),  # whose range float16 lacks
        (values(FP32, scale=PerTensor()), ProductCarrier(torch.float32, exact=True)),
    ],
    ids=lambda value: str(value.quantizer.scale) if isinstance(value, Site) else "",
)
def test_carriers_hold_elements_times_their_blocks_scales(point: Site, on_cuda: ProductCarrier) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        operand = point.values(dtype)
        assert product_carrier(operand, operand, CUDA) == on_cuda
        assert product_carrier(operand, operand, CPU).dtype == torch.float32


@pytest.mark.parametrize(
    "make",
    [
        lambda w: qsim.optim.AdamW([w], format="mxfp4"),
        lambda w: qsim.optim.AdamW([w], state=qsim.Block("e2m1", 32)),
        lambda w: qsim.optim.Quantized(torch.optim.SGD([w], 0.1), weight="nvfp4"),
        lambda w: qsim.optim.Quantized(torch.optim.SGD([w], 0.1), grad=Quantizer("e4m3", scale=PerTensor())),
        lambda w: qsim.optim.Quantized(torch.optim.SGD([w], 0.1), state={"momentum_buffer": Quantizer("e4m3", scale=PerTensor())}),
        lambda w: qsim.optim.Quantized(torch.optim.SGD([w], 0.1), accumulator=TURNED),
    ],
)
def test_optimizers_round_element_by_element(make: Callable[[nn.Parameter], object]) -> None:
    with pytest.raises(ValueError, match="optimizers round element by element"):
        make(nn.Parameter(torch.randn(4, 4)))
