"""qsim.nn.functional against torch.nn.functional: the same without points, and the same of rounded operands with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import qsim
from comparing import same_bits
from qsim import FivePoint, Quantizer
from qsim.nn import functional

pytestmark = pytest.mark.usefixtures("plain_arithmetic")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A call of a function that is linear in two operands.

    Attributes:
        function: Its name in torch and in qsim.
        shapes: Of the operands, and of the bias where there is one.
        options: The other arguments.
    """

    function: str
    shapes: tuple[Shape, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def two_inputs(self) -> bool:
        """Whether the second operand is no weight."""
        return self.function in ("matmul", "bmm")

    def torchs(self, *operands: Tensor) -> Tensor:
        """Torch's own result."""
        function = getattr(torch if self.two_inputs else F, self.function)
        return function(*operands, **self.options)  # type: ignore[no-any-return]

    def own(self, points: FivePoint | None, *operands: Tensor) -> Tensor:
        """The result with points."""
        return getattr(functional, self.function)(*operands, **self.options, points=points)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        shapes = " ".join("x".join(map(str, shape)) or "()" for shape in self.shapes)
        return f"{self.function} {shapes} {' '.join(f'{name}={value}' for name, value in self.options.items())}".strip()


LINEAR = [Case("linear", ((*rows, 5), (3, 5), (3,))) for rows in ((), (4,), (2, 4), (2, 2, 3), (0,))]
LINEAR += [Case("linear", ((4, 5), (3, 5))), Case("linear", ((4, 1), (1, 1), (1,)))]

MATRICES = [
    ((5,), (5,)),
    ((5,), (5, 3)),
    ((4, 5), (5,)),
    ((4, 5), (5, 3)),
    ((2, 4, 5), (5, 3)),
    ((4, 5), (2, 5, 3)),
    ((2, 4, 5), (2, 5, 3)),
]
MATRICES += [((5,), (2, 5, 3)), ((2, 4, 5), (5,)), ((2, 1, 4, 5), (3, 5, 2)), ((1, 4, 5), (3, 5, 2)), ((2, 2, 2, 3, 4), (2, 4, 3))]
MATMUL = [Case("matmul", shapes) for shapes in MATRICES] + [Case("bmm", ((2, 4, 5), (2, 5, 3)))]

CONV = [
    Case("conv1d", ((2, 4, 9), (6, 4, 3), (6,))),
    Case("conv1d", ((4, 9), (6, 2, 4), (6,)), {"padding": "same", "groups": 2}),
    Case("conv1d", ((2, 4, 9), (6, 4, 4)), {"padding": "same", "dilation": 2}),
    Case("conv1d", ((2, 4, 9), (4, 1, 3), (4,)), {"padding": (2,), "stride": (2,), "groups": 4}),
    Case("conv2d", ((2, 4, 7, 6), (6, 4, 3, 2), (6,))),
    Case("conv2d", ((2, 4, 7, 6), (6, 4, 3, 2), (6,)), {"padding": (2, 1), "stride": (2, 1), "dilation": (1, 3)}),
    Case("conv2d", ((2, 4, 7, 6), (6, 4, 4, 3), (6,)), {"padding": "same"}),
    Case("conv2d", ((2, 4, 7, 6), (6, 4, 2, 4)), {"padding": "same", "dilation": (3, 1)}),
    Case("conv2d", ((2, 4, 7, 6), (6, 4, 3, 3), (6,)), {"padding": "valid", "stride": 2, "dilation": 2}),
    Case("conv2d", ((4, 7, 6), (6, 2, 3, 3), (6,)), {"padding": 1, "groups": 2}),
    Case("conv3d", ((2, 2, 4, 5, 4), (4, 2, 2, 3, 2), (4,)), {"padding": (1, 0, 1), "stride": (1, 2, 1)}),
    Case("conv3d", ((2, 4, 5, 4), (4, 1, 2, 3, 4)), {"padding": "same", "groups": 2}),
]
TRANSPOSED = [
    Case("conv_transpose1d", ((2, 4, 5), (4, 6, 3), (6,)), {"stride": 2, "output_padding": 1}),
    Case("conv_transpose1d", ((4, 5), (4, 3, 3), (6,)), {"padding": 1, "groups": 2}),
    Case("conv_transpose2d", ((2, 4, 5, 4), (4, 6, 3, 2)), {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2)}),
    Case("conv_transpose2d", ((4, 5, 4), (4, 3, 3, 3), (6,)), {"dilation": (2, 1), "groups": 2}),
    Case("conv_transpose3d", ((2, 4, 3, 3, 2), (4, 2, 2, 3, 2), (4,)), {"stride": (2, 1, 2), "groups": 2}),
]
CASES = LINEAR + MATMUL + CONV + TRANSPOSED
cases = pytest.mark.parametrize("case", CASES, ids=str)

POINTS = {
    "float32 everywhere": FivePoint(act="fp32", weight="fp32", act_bwd="fp32", weight_bwd="fp32", grad="fp32"),
    "hybrid": FivePoint(act="e4m3", weight="e4m3", act_bwd="e4m3", weight_bwd="e4m3", grad="e5m2"),
    "the forward's tensors": FivePoint(act="e2m1", weight="e3m2", act_bwd="same", weight_bwd="same", grad="e5m2"),
    "all of their own": FivePoint(act="e2m1", weight="e3m2", act_bwd="int4", weight_bwd="e4m1", grad="e5m2", grad_w="fp16"),
    "gradient alone": FivePoint(grad="e3m0"),
    "weight alone": FivePoint(weight="e2m1"),
    "backward inputs alone": FivePoint(act_bwd="e2m1"),
}

#: No product here sums more terms than this; each may be off by half a unit in the last of float32's 24 bits.
TERMS = 256


def operands(case: Case, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Leaves of a case's shapes."""
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in case.shapes]


def rounded(x: Tensor, point: Quantizer | None) -> Tensor:
    """What a point makes of a tensor, by `qsim.quantize`."""
    if point is None:
        return x.detach()
    return qsim.quantize(x.detach(), point.format, rounding=point.rounding, overflow=point.overflow)


def results(function: Callable[..., Tensor], leaves: list[Tensor], upstream: Tensor | None = None) -> list[Tensor]:
    """A function's value and its gradients."""
    value = function(*leaves)
    upstream = torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).to(value) if upstream is None else upstream
    return [value.detach(), *torch.autograd.grad(value, leaves, upstream.to(value))]


def oracle(case: Case, leaves: list[Tensor], upstream: Tensor, points: FivePoint, transform: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Algorithms 1 and 2 by torch's own function and autograd, in float64; `transform` is applied to whatever goes in.

    The two products of the backward pass are the gradients of two other calls: each has the operand in it that is rounded for it.
    """
    weight = points.act if case.two_inputs else points.weight
    backward = {"act": points.act_bwd, "weight": points.act_bwd if case.two_inputs else points.weight_bwd}
    act_bwd, weight_bwd = (
        forward if point == "same" else point for forward, point in ((points.act, backward["act"]), (weight, backward["weight"]))
    )

    def wide(x: Tensor, point: Quantizer | None = None) -> Tensor:
        return transform(rounded(x, point).double())

    a, w, *bias = leaves
    biases = [wide(b).requires_grad_() for b in bias]
    value = case.torchs(wide(a, points.act), wide(w, weight), *biases)
    leaf_a, leaf_w = wide(a).requires_grad_(), wide(w).requires_grad_()
    (grad_a,) = torch.autograd.grad(case.torchs(leaf_a, wide(w, weight_bwd), *biases), leaf_a, wide(upstream, points.grad))
    (grad_w,) = torch.autograd.grad(case.torchs(wide(a, act_bwd), leaf_w, *biases), leaf_w, wide(upstream, points.grad_w or points.grad))
    return [value.detach(), grad_a, grad_w, *(torch.autograd.grad(value, biases, wide(upstream)) if biases else ())]


def check(case: Case, leaves: list[Tensor], points: FivePoint) -> None:
    """Holds a case against the oracle: results may differ by the error of summing in float32, which the sum of magnitudes bounds."""
    value = case.own(points, *leaves)
    upstream = torch.randn(value.shape).to(value)
    given = results(lambda *tensors: case.own(points, *tensors), leaves, upstream)
    expected = oracle(case, leaves, upstream, points, lambda x: x)
    magnitudes = oracle(case, leaves, upstream, points, torch.abs)
    for a, b, magnitude, leaf in zip(given, expected, magnitudes, [value, *leaves], strict=True):
        assert (a.shape, a.dtype) == (leaf.shape, leaf.dtype)
        half_unit = torch.finfo(a.dtype).eps / 2
        bound = magnitude * TERMS * 2.0**-24 + b.abs() * half_unit
        if a is given[0] and a.is_cuda and a.element_size() == 2 and "conv" in case.function:
            bound += magnitude * half_unit  # it is rounded before the bias is added, as torch's own is
        assert ((a.double() - b).abs() <= bound).all(), (a.double() - b).abs().max()


@cases
@pytest.mark.parametrize("points", [None, FivePoint()], ids=["none", "identity"])
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_without_points_is_torchs_own(case: Case, points: FivePoint | None, device: torch.device) -> None:
    leaves = operands(case, device)
    own, torchs = results(lambda *tensors: case.own(points, *tensors), leaves), results(case.torchs, leaves)
    assert all(same_bits(a, b) for a, b in zip(own, torchs, strict=True))


@cases
@pytest.mark.parametrize("name", POINTS)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_is_torchs_of_rounded_operands(case: Case, name: str, device: torch.device) -> None:
    check(case, operands(case, device), POINTS[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("case", [LINEAR[2], MATMUL[6], MATMUL[9], CONV[5], TRANSPOSED[2]], ids=str)
def test_keeps_other_dtypes(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    # The points hold in whatever dtype the model is; a product leaves rounded to that once.
    check(case, operands(case, device, dtype), POINTS["hybrid"])


@pytest.mark.parametrize("case", [LINEAR[2], MATMUL[3], CONV[4], TRANSPOSED[0]], ids=str)
@pytest.mark.parametrize("name", ["act", "weight", "act_bwd", "weight_bwd", "grad"])
def test_every_point_shows(case: Case, name: str, device: torch.device) -> None:
    # The bounds above are narrow enough to tell results without any one point from those with it.
    if case.two_inputs and name.startswith("weight"):
        return
    leaves = operands(case, device)
    upstream = torch.randn(case.torchs(*leaves).shape, device=device)
    without, points = oracle(case, leaves, upstream, FivePoint(), lambda x: x), FivePoint(**{name: "e4m3"})
    given = results(lambda *tensors: case.own(points, *tensors), leaves, upstream)
    differs = [not torch.allclose(a.double(), b, rtol=1e-3, atol=1e-4) for a, b in zip(given[:3], without[:3], strict=True)]
    both = case.two_inputs and name == "act_bwd"
    assert differs == [name in ("act", "weight"), name in ("weight_bwd", "grad") or both, name in ("act_bwd", "grad")]


@pytest.mark.parametrize("function", ["linear", "conv1d", "matmul"])
def test_autocast_gives_bfloat16_and_gradients_of_the_parameters_dtype(function: str) -> None:
    case = {"linear": LINEAR[2], "conv1d": CONV[0], "matmul": MATMUL[3]}[function]
    points = POINTS["hybrid"]
    leaves = operands(case, torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        value = case.own(points, *leaves)
        assert case.torchs(*leaves).dtype == value.dtype == torch.bfloat16
    value.float().square().sum().backward()
    assert [x.grad.dtype for x in leaves if x.grad is not None] == [torch.float32] * len(leaves)
    # The operands are rounded once, from float32; the bias is added as autocast would add it.
    assert same_bits(value, case.own(points, *leaves[:2], *(bias.bfloat16().float() for bias in leaves[2:])).bfloat16())


def test_autocast_hides_no_small_change_of_a_weight() -> None:
    # Rounded to bfloat16 first, this would be a tie, which goes to 1.
    x, w = torch.ones(1, 1), torch.tensor([[1.0625 + 2**-12]])
    points = FivePoint(weight="e4m3")
    with torch.autocast("cpu", torch.bfloat16):
        assert functional.linear(x, w, points=points).item() == functional.matmul(w, x, FivePoint(act="e4m3")).item() == 1.125


@pytest.mark.parametrize(
    "points", [FivePoint(act="e4m3"), FivePoint(weight="e4m3"), FivePoint(grad="e4m3"), FivePoint(act_bwd="e4m3")], ids=str
)
def test_autocast_makes_bfloat16_of_what_no_point_rounds_forward(points: FivePoint) -> None:
    a, w, _ = operands(LINEAR[2], torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        value = functional.linear(a, w, None, points)
    a, w = a if points.act else a.bfloat16().float(), w if points.weight else w.bfloat16().float()
    expected = F.linear(rounded(a, points.act).double(), rounded(w, points.weight).double())
    assert value.dtype == torch.bfloat16
    torch.testing.assert_close(value.double(), expected, rtol=2**-8, atol=2**-9)


# Embedding


@pytest.mark.parametrize("points", [None, FivePoint(), FivePoint(weight="fp32", grad="fp32")], ids=["none", "identity", "float32"])
@pytest.mark.parametrize("padding_idx", [None, 0, 2, -1])
@pytest.mark.parametrize("scale_grad_by_freq", [False, True])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_embedding_is_torchs(
    points: FivePoint | None, padding_idx: int | None, scale_grad_by_freq: bool, index: torch.dtype, device: torch.device
) -> None:
    table = torch.randn(5, 3, device=device, requires_grad=True)
    x = torch.tensor([[0, 2, 2], [4, 1, 2]], device=device, dtype=index)
    own = results(lambda w: functional.embedding(x, w, padding_idx, points, scale_grad_by_freq=scale_grad_by_freq), [table])
    torchs = results(lambda w: F.embedding(x, w, padding_idx, scale_grad_by_freq=scale_grad_by_freq), [table])
    assert all(same_bits(a, b) for a, b in zip(own, torchs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_embedding_rounds_its_table_and_its_gradient(dtype: torch.dtype, device: torch.device) -> None:
    points = FivePoint(act="e2m1", weight="e4m3", grad="e5m2")
    table = torch.randn(5, 3, device=device).to(dtype).requires_grad_()
    x = torch.tensor([0, 2, 2], device=device)
    upstream = torch.randn(3, 3, device=device).to(dtype)
    value, gradient = results(lambda w: functional.embedding(x, w, None, points), [table], upstream)
    assert same_bits(value, rounded(table, points.weight)[x])
    g = rounded(upstream, points.grad).double()
    expected = torch.zeros(5, 3, device=device, dtype=torch.float64)
    expected[0], expected[2] = g[0], g[1] + g[2]
    assert same_bits(gradient, expected.to(dtype))


def test_embedding_clips_the_gradient_of_what_saturates(device: torch.device) -> None:
    table = torch.tensor([[1000.0, 1.0], [-449.0, 448.0]], device=device, requires_grad=True)
    x = torch.tensor([0, 1, 1], device=device)
    points = FivePoint(weight=Quantizer("e4m3", clip_gradient=True))
    assert results(lambda w: functional.embedding(x, w, None, points), [table], torch.ones(3, 2))[1].tolist() == [[0, 1], [0, 2]]


def test_embedding_draws_a_tables_noise_anew_when_it_changes() -> None:
    points = FivePoint(weight=Quantizer("e2m1", "stochastic"))
    table = torch.full((4, 64), 1.25)
    x = torch.arange(4)
    first = functional.embedding(x, table, points=points)
    assert same_bits(first, functional.embedding(x, table, points=points))
    assert first.unique().tolist() == [1.0, 1.5]
    assert not same_bits(first, functional.embedding(x, table, points=points, stream=1))


# Attention

MASKS: dict[str, Any] = {
    "none": None,
    "boolean": torch.tensor([[True, False, True, True, False]] * 2 + [[False, True, True, False, True]] * 2),
    "float": torch.linspace(-2, 2, 20).view(4, 5),
    "of every head": torch.linspace(-2, 2, 120).view(2, 3, 4, 5),
    "a query that sees nothing": torch.tensor([[False] * 5, [True] * 5, [False] * 5, [True] * 5]),
}
ATTENTION = [{"attn_mask": mask} for mask in MASKS.values()] + [{"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}]
ATTENTION_IDS = [*MASKS, "causal", "scale", "grouped"]


def attention_operands(options: dict[str, Any], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value."""
    heads = (6, 3, 2) if options.get("enable_gqa") else (3, 3, 3)
    shapes = [(2, heads[0], 4, 6), (2, heads[1], 5, 6), (2, heads[2], 5, 7)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("options", ATTENTION, ids=ATTENTION_IDS)
@pytest.mark.parametrize("points", [None, FivePoint()], ids=["none", "identity"])
def test_attention_without_points_is_torchs_own(options: dict[str, Any], points: FivePoint | None) -> None:
    leaves = attention_operands(options)
    own = results(lambda *x: functional.scaled_dot_product_attention(*x, **options, points=points), leaves)
    torchs = results(lambda *x: F.scaled_dot_product_attention(*x, **options), leaves)
    assert all(same_bits(a, b) for a, b in zip(own, torchs, strict=True))


@pytest.mark.parametrize("options", ATTENTION, ids=ATTENTION_IDS)
def test_attention_with_wide_points_is_torchs(options: dict[str, Any]) -> None:
    leaves = attention_operands(options)
    own = results(lambda *x: functional.scaled_dot_product_attention(*x, **options, points=POINTS["float32 everywhere"]), leaves)
    torchs = results(lambda *x: F.scaled_dot_product_attention(*x, **options), leaves)
    for a, b in zip(own, torchs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("options", ATTENTION, ids=ATTENTION_IDS)
def test_attention_rounds_what_goes_into_its_two_products(options: dict[str, Any]) -> None:
    # "same" makes the gradients those of the rounded function, straight through each rounding: autograd's own.
    points = FivePoint(act="e4m3", act_bwd="same")

    def composed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if options.get("enable_gqa"):
            key, value = key.repeat_interleave(2, 1), value.repeat_interleave(3, 1)
        scale = options.get("scale", 6**-0.5)
        scores = torch.matmul(qsim.quantize(query, "e4m3"), qsim.quantize(key, "e4m3").mT) * scale
        mask = options.get("attn_mask", torch.ones(4, 5, dtype=torch.bool).tril() if options.get("is_causal") else None)
        if mask is not None:
            scores = scores.where(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        weights = torch.exp(scores - scores.amax(-1, keepdim=True).clamp(min=-100).detach())
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        return torch.matmul(qsim.quantize(weights, "e4m3"), qsim.quantize(value, "e4m3"))

    leaves = attention_operands(options)
    own = results(lambda *x: functional.scaled_dot_product_attention(*x, **options, points=points), leaves)
    for a, b in zip(own, results(composed, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


def test_attention_drops_what_torchs_does() -> None:
    leaves = attention_operands({})
    torch.manual_seed(1)
    own = functional.scaled_dot_product_attention(*leaves, dropout_p=0.5, points=FivePoint(act="fp32"))
    torch.manual_seed(1)
    torch.testing.assert_close(own, F.scaled_dot_product_attention(*leaves, dropout_p=0.5))
    assert not torch.allclose(own, F.scaled_dot_product_attention(*leaves))


# What is refused

NARROW = FivePoint(act="e4m3", weight="e4m3")
ONES = torch.ones


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (
            lambda: functional.linear(ONES(2, 3), ONES(4, 5), points=NARROW),
            ValueError,
            r"linear: x of shape \(2, 3\) does not fit a weight of shape \(4, 5\)",
        ),
        (lambda: functional.linear(ONES(()), ONES(4, 5), points=NARROW), ValueError, r"linear: x of shape \(\) does not fit"),
        (lambda: functional.linear(ONES(2, 3), ONES(4, 3), points="e4m3"), TypeError, "points must be a FivePoint or None, got 'e4m3'"),
        (
            lambda: functional.conv1d(ONES(1, 2, 3), ONES(2, 2, 1), points={"act": "e4m3"}),
            TypeError,
            "points must be a FivePoint or None, got {'act'",
        ),
        (lambda: functional.linear(ONES(2, 3).int(), ONES(4, 3), points=NARROW), TypeError, "got an operand of torch.int32"),
        (
            lambda: functional.linear(ONES(2, 3), ONES(4, 3).to(torch.complex64), points=NARROW),
            TypeError,
            "got an operand of torch.complex64",
        ),
        (
            lambda: functional.linear(ONES(2, 3), ONES(4, 3), ONES(1), NARROW),
            ValueError,
            r"linear: bias must have shape \(4,\), got \(1,\)",
        ),
        (
            lambda: functional.conv1d(ONES(1, 2, 3).bfloat16(), ONES(4, 2, 1).bfloat16(), ONES(1).bfloat16(), points=NARROW),
            ValueError,
            r"conv1d: bias must have shape \(4,\), got \(1,\)",
        ),
        (
            lambda: functional.conv_transpose2d(ONES(1, 2, 3, 3), ONES(2, 3, 1, 1), ONES(3), groups=2, points=NARROW),
            ValueError,
            r"conv_transpose2d: bias must have shape \(6,\), got \(3,\)",
        ),
        (
            lambda: functional.linear(ONES(2, 3), ONES(4, 3).to_sparse(), points=NARROW),
            TypeError,
            "points round dense tensors alone, got an operand of layout torch.sparse_coo",
        ),
        (
            lambda: functional.linear(ONES(2, 3), ONES(4, 3).to("meta"), points=NARROW),
            ValueError,
            "the operands of a product must be on one device, got cpu, meta",
        ),
        (
            lambda: functional.conv1d(ONES(1, 2, 3), ONES(4, 2, 1), ONES(4).to("meta"), points=NARROW),
            ValueError,
            "the operands of a product must be on one device, got cpu, cpu, meta",
        ),
        (lambda: functional.matmul(ONES(2, 3), ONES(2, 3), NARROW), ValueError, r"matmul: shapes \(2, 3\) and \(2, 3\) do not fit"),
        (lambda: functional.matmul(ONES(()), ONES(2), NARROW), ValueError, r"matmul: shapes \(\) and \(2,\) do not fit"),
        (lambda: functional.matmul(ONES(3), ONES(2), NARROW), ValueError, r"matmul: shapes \(3,\) and \(2,\) do not fit"),
        (lambda: functional.bmm(ONES(2, 3), ONES(3, 2), NARROW), ValueError, r"bmm: both must be batches of matrices, got shapes \(2, 3\)"),
        (lambda: functional.bmm(ONES(2, 2, 3), ONES(1, 3, 2), NARROW), ValueError, "bmm: batches of 2 and 1 matrices do not fit"),
        (
            lambda: functional.conv2d(ONES(2, 3), ONES(4, 3, 1, 1), points=NARROW),
            ValueError,
            r"conv2d: x of shape \(2, 3\) does not fit a weight of",
        ),
        (
            lambda: functional.conv_transpose1d(ONES(2, 3), ONES(4, 3), points=NARROW),
            ValueError,
            r"conv_transpose1d: x of shape \(2, 3\) does not fit",
        ),
        (lambda: functional.conv1d(ONES(1, 2, 4), ONES(2, 3, 1), points=NARROW), RuntimeError, "to have 3 channels, but got 2 channels"),
        (
            lambda: functional.conv1d(ONES(1, 2, 4), ONES(2, 2, 1), padding="full", points=NARROW),
            ValueError,
            "conv1d: padding must be numbers, 'valid' or 'same', got 'full'",
        ),
        (
            lambda: functional.conv1d(ONES(1, 2, 4), ONES(2, 2, 1), None, 2, "same", points=NARROW),
            ValueError,
            "conv1d: padding='same' needs a stride of 1",
        ),
        (
            lambda: functional.embedding(torch.tensor([0]), ONES(5, 2), 5, NARROW),
            ValueError,
            r"embedding: padding_idx must lie in -5…4, got 5",
        ),
        (
            lambda: functional.embedding(torch.tensor([0]), ONES(5, 2), -6, NARROW),
            ValueError,
            r"embedding: padding_idx must lie in -5…4, got -6",
        ),
        (
            lambda: functional.embedding(torch.tensor([0]), ONES(5, 2).bfloat16(), None, FivePoint(weight="fp16")),
            ValueError,
            "torch.bfloat16, which cannot hold",
        ),
        (
            lambda: _attention(attn_mask=ONES(3, 3, dtype=torch.uint8)),
            ValueError,
            "attn_mask must be bool or floating as the query is, got torch.uint8",
        ),
        (lambda: _attention(attn_mask=ONES(3, 3), is_causal=True), ValueError, "give attn_mask or is_causal, not both"),
        (lambda: _attention((1, 5, 3, 4), (1, 2, 3, 4), enable_gqa=True), ValueError, "must divide the query's 5, got 2 and 2"),
    ],
)
def test_refuses_in_words(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


def _attention(query: Shape = (1, 3, 4), key: Shape = (1, 3, 4), **options: Any) -> Tensor:
    return functional.scaled_dot_product_attention(ONES(query), ONES(key), ONES(key), **options, points=NARROW)
