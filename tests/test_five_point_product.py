"""The product against one written out: every operand rounded by itself, multiplied in float64, the gradients taken by torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, distributed, multiprocessing
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import qsim
from comparing import same_bits
from qsim import FivePoint, Fixed, Float, Int, Quantizer, Stochastic, random
from qsim.formats import BF16, E2M1, E4M3, E5M2, FP16, NAMED, Format
from qsim.nn.carriers import carrier, multiply
from qsim.nn.five_point_product import five_point_product
from qsim.nn.operands import ACT, ACT_BWD, GRAD, GRAD_W, SECOND, WEIGHT, WEIGHT_BWD, Setting
from qsim.nn.products import Convolution, Linear, Matmul, Product

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def noisy(fmt: str | Format, bits: int | None = None, **options: Any) -> Quantizer:
    """A point that rounds stochastically."""
    return Quantizer(fmt, Stochastic(bits), **options)


# Formats of up to 8 bits are kept as codes for the backward pass, the others are rounded again.
NARROW, WIDE = Float(4, 1), Float(5, 6)
POINTS = {
    **{name: FivePoint(**{name: noisy(NARROW)}) for name in ("act", "weight", "act_bwd", "weight_bwd", "grad")},
    "nearest": FivePoint("e4m3", "e4m3", "e4m3", "e4m3", "e5m2"),
    "all": FivePoint(noisy("e4m3"), noisy("e2m1"), noisy("e3m2"), noisy("int4"), noisy("e5m2"), noisy(NARROW)),
    "wide": FivePoint(*[noisy(WIDE)] * 6),
    "narrow and wide": FivePoint(noisy("e4m3"), Fixed(12, 6), noisy(WIDE), noisy("e4m3"), noisy(Float(8, 7), 5), noisy("e5m2")),
    "same": FivePoint(noisy("e4m3"), noisy("e2m1"), "same", "same", "e5m2"),
    "same, wide": FivePoint(noisy(WIDE), noisy(WIDE), "same", "same"),
    "same as nothing": FivePoint(None, None, "same", "same", noisy("e5m2")),
    "grad_w": FivePoint(grad=noisy("e5m2"), grad_w=noisy(NARROW)),
    "grad_w, nearest": FivePoint(grad=noisy("e5m2"), grad_w=NARROW),
    "recipe": FivePoint(None, "e2m1", noisy(NARROW), "same", noisy(NARROW)),
    "clipped": FivePoint(Quantizer("e2m1", clip_gradient=True), noisy(Int(3), clip_gradient=True), noisy("e4m3"), "same", "e5m2"),
    "clipped at zero": FivePoint(Quantizer(Int(4, signed=False), clip_gradient=True), None, "same"),
}


class Case(NamedTuple):
    """A product, torch's own function for it, and operands."""

    product: Product
    own: Callable[..., Tensor]
    a: tuple[int, ...]
    w: tuple[int, ...]
    bias: int | None = None
    two_inputs: bool = False


def linear(*shape: int, bias: int | None = 6) -> Case:
    return Case(Linear(), F.linear, shape, (6, shape[-1]), bias)


def matmul(a: tuple[int, ...], b: tuple[int, ...]) -> Case:
    return Case(Matmul(), torch.matmul, a, b, two_inputs=True)


def convolution(
    dims: int, stride: int = 1, padding: int = 0, dilation: int = 1, output_padding: int = 0, groups: int = 1, transposed: bool = False
) -> Case:
    four = tuple((number,) * dims for number in (stride, padding, dilation, output_padding))
    names = {False: (F.conv1d, F.conv2d, F.conv3d), True: (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)}
    function = names[transposed][dims - 1]
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    options |= {"output_padding": output_padding} if transposed else {}
    channels = (4, 6 // groups) if transposed else (6, 4 // groups)
    return Case(
        Convolution(*four, groups, transposed),
        lambda a, w, b=None: function(a, w, b, **options),
        (3, 4, 8, 7, 6)[: 2 + dims],
        (*channels, *(3,) * dims),
        6,
    )


CASES = {
    "linear, one row": linear(7),
    "linear": linear(5, 7),
    "linear, three dimensions": linear(3, 5, 7),
    "linear, four dimensions": linear(2, 3, 5, 7),
    "linear, no bias": linear(3, 5, 7, bias=None),
    "linear, no rows": linear(0, 7),
    "linear, no rows of three dimensions": linear(2, 0, 7),
    "linear, no columns": linear(4, 0),
    "matmul": matmul((4, 5), (5, 3)),
    "matmul, batches": matmul((2, 4, 5), (2, 5, 3)),
    "matmul, one right": matmul((2, 4, 5), (5, 3)),
    "matmul, one left": matmul((4, 5), (2, 5, 3)),
    "matmul, broadcast": matmul((3, 1, 4, 5), (2, 5, 6)),
    "matmul, no batch": matmul((0, 4, 5), (5, 3)),
    **{f"conv{dims}d": convolution(dims) for dims in (1, 2, 3)},
    "conv1d, everything": convolution(1, 2, 1, 2, groups=2),
    "conv2d, everything": convolution(2, 2, 1, 2, groups=2),
    "conv3d, stride, padding": convolution(3, 2, 1),
    "conv2d, no bias": convolution(2)._replace(bias=None),
    "conv2d, no batch": convolution(2)._replace(a=(0, 4, 8, 7)),
    **{f"transposed {dims}d": convolution(dims, 2, 1, 1, 1, transposed=True) for dims in (1, 2, 3)},
    "transposed 2d, groups, dilation": convolution(2, 1, 0, 2, groups=2, transposed=True),
}


@pytest.fixture(autouse=True)
def _arithmetic() -> Iterator[None]:
    """GPUs convolve float32 in TF32 unless told otherwise; tensors this small are not worth a second thread."""
    before = torch.backends.cudnn.allow_tf32, torch.get_num_threads()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(1)
    yield
    torch.backends.cudnn.allow_tf32 = before[0]
    torch.set_num_threads(before[1])


def operands(case: Case, dtype: torch.dtype, device: torch.device, scale: float = 3.0) -> tuple[Tensor, ...]:
    """The operands of a case that require gradients, the bias among them if it has one."""
    shapes = [case.a, case.w] + ([(case.bias,)] if case.bias else [])
    return tuple((torch.randn(shape) * scale).to(device, dtype).requires_grad_() for shape in shapes)


def run(case: Case, points: FivePoint, given: tuple[Tensor, ...], g: Tensor | None = None, stream: int = 0) -> list[Tensor]:
    """The result and the gradients of the operands."""
    a, w, *bias = given
    y = five_point_product(a, w, bias[0] if bias else None, Setting(points, case.product, case.two_inputs), stream)
    g = gradient(y) if g is None else g
    return [y, *torch.autograd.grad(y, given, g)]


def gradient(y: Tensor) -> Tensor:
    """A gradient of a result: the same at every call."""
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)


def rounded(x: Tensor, point: Quantizer | None, seed: Tensor | None, stream: int) -> Tensor:
    """What a point makes of a tensor, in float64."""
    if point is None:
        return x.detach().double()
    seed = seed if point.rounding.is_stochastic else None
    stream = stream if seed is not None else 0
    return point(x.detach(), seed=seed, stream=stream, dtype=torch.float64)


def passes(x: Tensor, point: Quantizer | None) -> Tensor | float:
    """Where gradients pass a point."""
    if point is None or not point.clip_gradient:
        return 1.0
    return ((x >= point.format.min) & (x <= point.format.max)).double()


class Due(NamedTuple):
    """What should come out: the exact result, the sum of the magnitudes it adds up, and whether torch computes it without a carrier."""

    exact: Tensor
    size: Tensor
    own: bool


def written_out(case: Case, points: FivePoint, given: tuple[Tensor, ...], g: Tensor, seed: int, stream: int) -> list[Due]:
    """Algorithms 1 and 2 line by line in float64: the result and the gradients."""
    a, w, *bias = given
    torch.manual_seed(seed)
    drawn = random.seed_tensor(None, None, a.device) if points.is_stochastic else None
    act, act_bwd = points.act, points.act_bwd
    weight, weight_bwd = (act, act_bwd) if case.two_inputs else (points.weight, points.weight_bwd)
    streams = [ACT ^ SECOND, ACT_BWD ^ SECOND] if case.two_inputs else [WEIGHT, WEIGHT_BWD]
    w_drawn = drawn if case.two_inputs else random.weight_seed(w, stream) if points.weight_is_stochastic else None
    a_fwd = rounded(a, act, drawn, ACT)
    w_fwd = rounded(w, weight, w_drawn, streams[0])
    a_bwd = a_fwd if isinstance(act_bwd, str) else rounded(a, act_bwd, drawn, ACT_BWD)
    w_bwd = w_fwd if isinstance(weight_bwd, str) else rounded(w, weight_bwd, w_drawn, streams[1])
    g_a = rounded(g, points.grad, drawn, GRAD)
    g_w = g_a if points.grad_w is None else rounded(g, points.grad_w, drawn, GRAD_W)
    b = [x.detach().double() for x in bias]
    used_a, used_w = (act if act_bwd == "same" else act_bwd), (weight if weight_bwd == "same" else weight_bwd)
    rest = [d for d in range(g.dim()) if d != (g.dim() - 1 if isinstance(case.product, Linear) else 1)]
    return [
        Due(case.own(a_fwd, w_fwd, *b), case.own(a_fwd.abs(), w_fwd.abs(), *(x.abs() for x in b)), act is weight is None),
        Due(by_torch(case, 0, a, w_bwd, g_a) * passes(a, act), by_torch(case, 0, a, w_bwd.abs(), g_a.abs()), points.grad is used_w is None),
        Due(
            by_torch(case, 1, a_bwd, w, g_w) * passes(w, weight),
            by_torch(case, 1, a_bwd.abs(), w, g_w.abs()),
            points.grad is used_a is None,
        ),
        *[Due(add(g.double(), rest), add(g.double().abs(), rest), False) for _ in b],
    ]


def add(x: Tensor, dims: list[int]) -> Tensor:
    """The sum over some dimensions: no dimensions are none, not all."""
    return x.sum(dims) if dims else x


def by_torch(case: Case, which: int, a: Tensor, w: Tensor, g: Tensor) -> Tensor:
    """The gradient of one operand of torch's own product, in float64."""
    both = [a.detach().double(), w.detach().double()]
    both[which].requires_grad_()
    return torch.autograd.grad(case.own(*both), both[which], g)[0]


def check(case: Case, points: FivePoint, given: tuple[Tensor, ...], g: Tensor | None = None) -> None:
    """Holds the product against the one written out, up to what sums in float32 and the dtype of the result do to it."""
    torch.manual_seed(5)
    actual = run(case, points, given, g, stream=77)
    g = gradient(actual[0]) if g is None else g
    expected = written_out(case, points, given, g, 5, 77)
    for name, found, like, due in zip(("y", "a", "w", "bias"), actual, (actual[0], *given), expected, strict=False):
        assert (found.dtype, found.shape) == (like.dtype, due.exact.shape), name
        facts = torch.finfo(found.dtype)
        # Left to itself, torch may sum in 16 bits on processors.
        accumulation = 8 * facts.eps if due.own and found.element_size() == 2 else 1e-6
        bound = accumulation * due.size + facts.eps * due.exact.abs() + facts.smallest_normal * facts.eps
        error = (found.double() - due.exact).abs()
        assert (error <= bound).all(), f"{name} is off by {error.max():.3g}, {(error / bound).max():.3g} times what it may"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("case", ["linear, three dimensions", "matmul, broadcast", "conv2d, everything"])
def test_every_point(device: torch.device, case: str, points: FivePoint, dtype: torch.dtype) -> None:
    check(CASES[case], points, operands(CASES[case], dtype, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("points", [POINTS[name] for name in ("all", "wide", "recipe")], ids=["all", "wide", "recipe"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_product(device: torch.device, case: Case, points: FivePoint, dtype: torch.dtype) -> None:
    check(case, points, operands(case, dtype, device))


@pytest.mark.parametrize("points", [POINTS[name] for name in ("all", "wide", "same", "clipped")], ids=["all", "wide", "same", "clipped"])
def test_strides_do_not_matter(device: torch.device, points: FivePoint) -> None:
    a = torch.randn(7, 5, 3, device=device).permute(2, 1, 0)
    w = torch.randn(7, 6, device=device).t()
    bias = torch.randn(12, device=device)[::2]
    expanded = torch.randn(1, 7, device=device).expand(3, 5, 7)
    g = torch.randn(6, 5, 3, device=device).permute(2, 1, 0)
    ones = torch.ones((), device=device).expand(3, 5, 6)
    for rows, upstream in ((a, g), (expanded, g), (a, ones)):
        check(linear(3, 5, 7), points, tuple(x.detach().requires_grad_() for x in (rows, w, bias)), upstream)
    image = torch.randn(3, 4, 8, 7, device=device).to(memory_format=torch.channels_last)
    kernel = torch.randn(6, 4, 3, 3, device=device).transpose(2, 3)
    check(convolution(2), points, tuple(x.detach().requires_grad_() for x in (image, kernel, bias)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith(("conv", "transposed", "matmul, one left"))])
def test_without_points_it_is_torchs_own(device: torch.device, case: str, dtype: torch.dtype) -> None:
    # All but a matrix times a batch, which torch computes transposed.
    given = operands(CASES[case], dtype, device)
    own = CASES[case].own(*given)
    results = [own, *torch.autograd.grad(own, given, gradient(own))]
    assert all(map(same_bits, run(CASES[case], FivePoint(), given), results))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [name for name in CASES if name.startswith(("conv", "transposed"))])
def test_convolutions_without_points_are_torchs_own(case: str, dtype: torch.dtype) -> None:
    # All but the gradient of the bias, which torch sums in an order of its own, and in 16 bits at places.
    given = operands(CASES[case], dtype, torch.device("cpu"))
    own = CASES[case].own(*given)
    results = [own, *torch.autograd.grad(own, given, gradient(own))]
    found = run(CASES[case], FivePoint(), given)
    assert all(map(same_bits, found[:3], results[:3]))
    if CASES[case].bias:
        exact = gradient(own).double().sum([0, *range(2, own.dim())])
        torch.testing.assert_close(found[3].double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("needing", range(8))
def test_gradients_are_those_asked_for(device: torch.device, needing: int) -> None:
    case, points = linear(5, 7), POINTS["all"]
    given = operands(case, torch.float32, device)
    torch.manual_seed(1)
    everything = run(case, points, given)
    some = [x.detach().requires_grad_(bool(needing >> i & 1)) for i, x in enumerate(given)]
    torch.manual_seed(1)
    y = five_point_product(*some, Setting(points, Linear()))  # type: ignore[arg-type]
    assert same_bits(y, everything[0])
    assert y.requires_grad == bool(needing)
    if needing:
        y.backward(gradient(y))
    for x, expected in zip(some, everything[1:], strict=True):
        assert x.grad is None if not x.requires_grad else same_bits(x.grad, expected)  # type: ignore[arg-type]


def test_mixed_dtypes_give_each_operand_its_own_gradient(device: torch.device) -> None:
    a = torch.randn(5, 7, device=device, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(6, 7, device=device, requires_grad=True)
    for points in POINTS.values():
        check(linear(5, 7, bias=None), points, (a, w))


def test_two_inputs_draw_apart(device: torch.device) -> None:
    x = torch.full((16, 16), 1.25, device=device, requires_grad=True)
    seen: list[Tensor] = []

    @dataclasses.dataclass(frozen=True)
    class Spy(Matmul):
        def forward(self, a: Tensor, w: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
            seen.extend([a, w])
            return super().forward(a, w, bias, dtype)

        def grad_a(self, g: Tensor, w: Tensor, a_shape: torch.Size, dtype: torch.dtype) -> Tensor:
            seen.append(w)
            return super().grad_a(g, w, a_shape, dtype)

        def grad_w(self, g: Tensor, a: Tensor, w_shape: torch.Size, dtype: torch.dtype) -> Tensor:
            seen.append(a)
            return super().grad_w(g, a, w_shape, dtype)

    five_point_product(x, x, None, Setting(FivePoint(noisy("e2m1"), None, noisy("e2m1")), Spy(), True)).sum().backward()
    assert len(seen) == 4
    assert all(set(s.unique().tolist()) == {1.0, 1.5} for s in seen)
    assert all(not torch.equal(s, t) for i, s in enumerate(seen) for t in seen[:i]), "four roundings of one tensor, four draws"


def test_not_a_number_stays_one(device: torch.device) -> None:
    a = torch.randn(5, 7, device=device)
    a[2, 3] = torch.nan
    a.requires_grad_()
    w = torch.randn(6, 7, device=device, requires_grad=True)
    y, grad_a, _ = run(linear(5, 7, bias=None), POINTS["nearest"], (a, w))
    assert y.isnan().any(1).tolist() == [False, False, True, False, False]
    assert not grad_a.isnan().any()


# Carriers.

FEW_BITS = {name: fmt for name, fmt in NAMED.items() if fmt.precision <= 8}


def test_the_formats_of_few_bits_are_the_ones_meant() -> None:
    assert {"e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "e8m0", "bf16", "int8", "int4"} <= set(FEW_BITS)
    assert not {"fp16", "tf32", "fp32"} & set(FEW_BITS)


@pytest.mark.parametrize("fmt", FEW_BITS.values(), ids=FEW_BITS)
@pytest.mark.parametrize("case", ["linear", "matmul", "conv"])
def test_products_of_few_bits_are_exact(device: torch.device, fmt: Format, case: str) -> None:
    chosen = {
        "linear": Case(Linear(), F.linear, (64, 96), (80, 96)),
        "matmul": matmul((2, 48, 96), (2, 96, 64)),
        "conv": convolution(2)._replace(bias=None),
    }[case]
    given = operands(chosen, torch.float32, device, scale=min(1.0, fmt.max / 4) if fmt.max < 100 else 8.0)
    check(chosen, FivePoint(fmt, fmt, "same", "same", fmt), given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_convolutions_are_not_rounded_to_a_narrow_carrier(dtype: torch.dtype) -> None:
    # The carriers of a GPU, on any device.
    case = convolution(2)
    a, w, bias = (qsim.quantize(x.detach(), "e4m3", dtype=dtype) for x in operands(case, torch.float32, torch.device("cpu")))
    exact = case.own(a.double(), w.double(), bias.double())
    torch.testing.assert_close(case.product.forward(a, w, bias.float(), torch.float32).double(), exact, rtol=1e-6, atol=1e-5)
    g = qsim.quantize(gradient(exact), "e5m2", dtype=dtype)
    for found, which in ((case.product.grad_a(g, w, a.shape, torch.float32), 0), (case.product.grad_w(g, a, w.shape, torch.float32), 1)):
        torch.testing.assert_close(found.double(), by_torch(case, which, a, w, g.double()), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("fmt", FEW_BITS.values(), ids=FEW_BITS)
def test_a_product_of_two_values_is_exact_in_float32(fmt: Format) -> None:
    values = torch.tensor(fmt.values() if fmt.bits <= 8 else fmt.values()[:: 2**6 - 1], dtype=torch.float64)
    assert torch.equal(values.bfloat16().double(), values), "bfloat16 holds the format"
    product = values[:, None] * values
    fits = (product == 0) | ((product.abs() >= 2.0**-126) & (product.abs() < 2.0**128))
    assert fits.sum() >= len(values)
    assert torch.equal(product.float().double()[fits], product[fits])


CUDA, CPU = torch.device("cuda"), torch.device("cpu")
TF32 = qsim.format("tf32")


@pytest.mark.parametrize(
    ("first", "second", "on_cuda", "on_cpu"),
    [
        ((E4M3, torch.float32), (E5M2, torch.float32), torch.bfloat16, torch.float32),
        ((E4M3, torch.float16), (E4M3, torch.float16), torch.bfloat16, torch.float32),
        ((E4M3, torch.float64), (E2M1, torch.float64), torch.bfloat16, torch.float32),
        ((qsim.format("e8m0"), torch.float32), (BF16, torch.float32), torch.bfloat16, torch.float32),
        ((Int(8), torch.float32), (Int(8), torch.float32), torch.bfloat16, torch.float32),
        ((FP16, torch.float32), (FP16, torch.float32), torch.float16, torch.float32),
        ((FP16, torch.float32), (E4M3, torch.float32), torch.float16, torch.float32),
        ((FP16, torch.float32), (BF16, torch.float32), torch.float32, torch.float32),
        ((TF32, torch.float32), (E4M3, torch.float32), torch.float32, torch.float32),
        ((Int(16), torch.float32), (E4M3, torch.float32), torch.float32, torch.float32),
        ((Int(32), torch.float64), (E4M3, torch.float64), torch.float64, torch.float64),
        ((None, torch.float32), (E4M3, torch.float32), torch.float32, torch.float32),
        ((None, torch.bfloat16), (E4M3, torch.bfloat16), torch.bfloat16, torch.float32),
        ((None, torch.float16), (E4M3, torch.float16), torch.float16, torch.float32),
        ((E4M3, torch.float16), (None, torch.bfloat16), torch.bfloat16, torch.float32),
        ((None, torch.float64), (E4M3, torch.float64), torch.float64, torch.float64),
        *[((None, dtype), (None, dtype), dtype, dtype) for dtype in DTYPES],
        ((None, torch.float16), (None, torch.bfloat16), torch.float32, torch.float32),
    ],
)
def test_carrier_is_the_cheapest_that_holds_both(first: Any, second: Any, on_cuda: torch.dtype, on_cpu: torch.dtype) -> None:
    a, b = ((None if fmt is None else Quantizer(fmt), dtype) for fmt, dtype in (first, second))
    assert carrier(a, b, CUDA) == carrier(b, a, CUDA) == on_cuda
    assert carrier(a, b, CPU) == carrier(b, a, CPU) == on_cpu


def test_multiply_sums_in_float32(device: torch.device) -> None:
    # 1 and 2**-9 many times: in bfloat16 the sum would stay where it is.
    narrow = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.full((1, 257), 2.0**-9, device=device, dtype=narrow)
    a[0, 0] = 1.0
    b = torch.ones(257, 1, device=device, dtype=narrow)
    for left, right in ((a, b), (a[None], b[None])):
        assert multiply(left, right, torch.float32).item() == 1.5
        assert multiply(left, right, torch.float64).dtype == torch.float64


# What is computed, and what is kept.


class Operators(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.name().removesuffix(".default"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", ["linear", "matmul", "conv2d"])
def test_nothing_is_kept_or_copied_without_gradients(device: torch.device, case: str) -> None:
    given = operands(CASES[case], torch.float32, device)
    a, w, *bias = given
    setting = Setting(POINTS["clipped"], CASES[case].product, CASES[case].two_inputs)
    torch.manual_seed(2)
    expected = five_point_product(a, w, bias[0] if bias else None, setting)
    torch.manual_seed(2)
    with torch.no_grad(), Operators() as ran:
        found = five_point_product(a, w, bias[0] if bias else None, setting)
    assert same_bits(found, expected)
    assert ran.names.count("qsim::quantize") == 2
    forbidden = ("encode", "clone", "copy", "lt", "gt", "bitwise_or")
    assert not [name for name in ran.names if any(word in name.split("::")[1] for word in forbidden)], ran.names


def kept(points: FivePoint, case: Case, given: tuple[Tensor, ...]) -> list[Tensor]:
    """The tensors that are kept for the backward pass, seeds left out."""
    found: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        found.append(x)
        return x

    a, w, *bias = given
    with saved_tensors_hooks(pack, lambda x: x):
        y = five_point_product(a, w, bias[0] if bias else None, Setting(points, case.product, case.two_inputs))
    assert y.grad_fn is not None
    return [x for x in found if x.dim()]


@pytest.mark.parametrize("fmt", [E4M3, E2M1, Int(8), Float(4, 1, signed=False)], ids=repr)
@pytest.mark.parametrize("act", [None, "e4m3", "e5m2"])
def test_narrow_inputs_are_kept_as_codes(device: torch.device, fmt: Format, act: str | None) -> None:
    a, w, _ = given = operands(linear(5, 7), torch.float32, device)
    codes, weight = kept(FivePoint(act, "e4m3", Quantizer(fmt), "e4m3", "e5m2"), linear(5, 7), given)
    assert same_bits(codes, qsim.encode(a.detach(), fmt, check=False))
    assert codes.dtype == torch.uint8
    assert weight.data_ptr() == w.data_ptr(), "the weight is there anyway"


def test_what_is_kept_of_the_same_rounding_is_its_codes(device: torch.device) -> None:
    given = operands(linear(5, 7), torch.float32, device)
    torch.manual_seed(4)
    codes, _ = kept(POINTS["same"], linear(5, 7), given)
    torch.manual_seed(4)
    seed = random.seed_tensor(None, None, device)
    assert same_bits(codes, qsim.encode(given[0].detach(), "e4m3", rounding="stochastic", seed=seed, stream=ACT))


@pytest.mark.parametrize("points", ["act", "wide", "same, wide", "same as nothing"])
def test_what_has_no_narrow_code_is_kept_as_it_is(device: torch.device, points: str) -> None:
    a, w, _ = given = operands(linear(5, 7), torch.float32, device)
    assert [x.data_ptr() for x in kept(POINTS[points], linear(5, 7), given)] == [a.data_ptr(), w.data_ptr()]


def test_a_second_input_is_kept_as_the_first_is(device: torch.device) -> None:
    case = CASES["matmul"]
    given = operands(case, torch.bfloat16, device)
    assert [(x.dtype, x.shape) for x in kept(FivePoint("e4m3", None, "e2m1"), case, given)] == [(torch.uint8, x.shape) for x in given]


def test_only_what_gradients_need_is_kept(device: torch.device) -> None:
    a, w, _ = operands(linear(5, 7), torch.float32, device)
    assert [x.dtype for x in kept(POINTS["all"], linear(5, 7), (a.detach(), w))] == [torch.uint8]
    assert [x.data_ptr() for x in kept(POINTS["all"], linear(5, 7), (a, w.detach()))] == [w.data_ptr()]


def test_a_weight_changed_before_the_backward_pass_is_noticed(device: torch.device) -> None:
    a, w, _ = operands(linear(5, 7), torch.float32, device)
    y = five_point_product(a, w, None, Setting(POINTS["all"], Linear()))
    with torch.no_grad():
        w.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_of_gradients_are_refused(device: torch.device) -> None:
    a, w, _ = operands(linear(5, 7), torch.float32, device)
    y = five_point_product(a, w, None, Setting(POINTS["all"], Linear()))
    (grad,) = torch.autograd.grad(y.square().sum(), w, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# Seeds.


def test_every_call_draws_anew_and_manual_seed_governs(device: torch.device) -> None:
    case, given = linear(64, 32), operands(linear(64, 32), torch.float32, device)
    torch.manual_seed(1)
    first, second = run(case, POINTS["all"], given), run(case, POINTS["all"], given)
    torch.manual_seed(1)
    assert all(map(same_bits, run(case, POINTS["all"], given), first))
    assert all(not same_bits(x, y) for x, y in zip(first[:3], second[:3], strict=True))


def test_nothing_is_drawn_where_nothing_is_stochastic(device: torch.device) -> None:
    before = torch.get_rng_state()
    run(linear(5, 7), POINTS["nearest"], operands(linear(5, 7), torch.float32, device))
    torch.set_rng_state(before)
    given = operands(linear(5, 7), torch.float32, device)
    after = torch.get_rng_state()
    run(linear(5, 7), POINTS["nearest"], given)
    # The weight's own points have no say where there are two inputs, and its noise is not drawn from the generator.
    five_point_product(given[0], given[0].t(), None, Setting(FivePoint(weight=noisy("e4m3")), Matmul(), True))
    five_point_product(given[0], given[1], None, Setting(FivePoint(weight=noisy("e4m3")), Linear()))
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("points", ["all", "wide", "same"])
def test_checkpointing_replays_the_same_noise(device: torch.device, points: str, reentrant: bool) -> None:
    given = operands(linear(64, 32), torch.float32, device)
    setting = Setting(POINTS[points], Linear())

    def block(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return five_point_product(a, w, bias, setting).square()

    def gradients(call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(8)
        y = call(*given)
        torch.rand(3)  # whatever is drawn between the passes
        for x in given:
            x.grad = None
        y.backward(gradient(y))
        return tuple(x.grad for x in given if x.grad is not None)

    expected = gradients(block)
    found = gradients(lambda *given: checkpoint(block, *given, use_reentrant=reentrant))
    assert len(expected) == 3
    assert all(map(same_bits, found, expected))


@pytest.mark.parametrize("case", ["linear", "matmul, one right", "conv2d", "transposed 2d"])
@pytest.mark.parametrize("points", ["nearest", "clipped at zero"])
def test_compiled_code_gives_the_same_bits(device: torch.device, case: str, points: str) -> None:
    given = operands(CASES[case], torch.float32, device)
    expected = run(CASES[case], POINTS[points], given)
    setting = Setting(POINTS[points], CASES[case].product, CASES[case].two_inputs)
    forward = torch.compile(
        lambda a, w, bias=None: five_point_product(a, w, bias, setting), fullgraph=True, backend="aot_eager", dynamic=False
    )
    y = forward(*given)
    assert all(map(same_bits, [y, *torch.autograd.grad(y, given, gradient(y))], expected))


def test_compiled_code_draws_anew(device: torch.device) -> None:
    a, w = operands(linear(64, 32, bias=None), torch.float32, device)
    setting = Setting(POINTS["recipe"], Linear())
    forward = torch.compile(lambda a, w: five_point_product(a, w, None, setting), fullgraph=True, backend="aot_eager")
    found = []
    for _ in range(3):
        y = forward(a, w)
        found.append(torch.autograd.grad(y, (a, w), gradient(y)))
    assert all(x.isfinite().all() for pair in found for x in pair)
    assert all(not torch.equal(found[i][k], found[j][k]) for k in (0, 1) for i in range(3) for j in range(i))


def weight_seed(w: Tensor, stream: int = 0) -> int:
    return int(random.weight_seed(w, stream))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weights_seed_changes_when_the_weight_does_and_only_then(device: torch.device, dtype: torch.dtype) -> None:
    w = torch.randn(6, 7).to(device, dtype).requires_grad_()
    seed = weight_seed(w)
    assert random.weight_seed(w, 0).device == w.device
    assert seed == weight_seed(w) == weight_seed(w.detach().clone()) == weight_seed(w.t())
    assert seed != weight_seed(w, 1)
    with torch.no_grad():
        w[3, 4] = torch.nextafter(w[3, 4].float(), torch.tensor(9.0, device=device)) if dtype == torch.float32 else w[3, 4] * 1.5
        assert seed != weight_seed(w)
    torch.manual_seed(torch.initial_seed() + 1)
    assert weight_seed(w) != seed


def weight_seen(w: Tensor, points: FivePoint, rows: Tensor | None = None, stream: int = 0) -> Tensor:
    """The weight as the forward product takes it: what the identity matrix is multiplied by."""
    a = torch.eye(w.shape[1], device=w.device) if rows is None else rows
    return five_point_product(a, w, None, Setting(points, Linear()), stream).detach()[: w.shape[1]].t()


def test_micro_batches_round_the_weight_alike(device: torch.device) -> None:
    points = FivePoint(weight=noisy("e2m1"), weight_bwd="same", act_bwd=noisy("e4m3"), grad=noisy("e5m2"))
    w = torch.randn(40, 32, device=device, requires_grad=True)
    eye = torch.eye(32, device=device)
    first = weight_seen(w, points)
    assert set(first.unique().tolist()) <= set(E2M1.values())
    for batch in (1, 5):
        assert same_bits(weight_seen(w, points, torch.cat([eye, torch.randn(batch, 32, device=device)])), first)
    assert not same_bits(weight_seen(w, points, stream=1), first)
    with torch.no_grad():
        w.mul_(1 + 2.0**-20)
    assert not same_bits(weight_seen(w, points), first), "after a step it is drawn anew"


def _replica(rank: int, folder: str, seeds: tuple[int, int]) -> None:
    """What a process of a distributed run computes."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(seeds[rank])
    w = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    eye = torch.eye(32)
    seen = weight_seen(w, FivePoint(weight=noisy("e2m1")))
    # The same seed on both: what is left is the stream of the process.
    torch.manual_seed(9)
    inputs = five_point_product(w, eye, None, Setting(FivePoint(act=noisy("e2m1")), Linear()))
    torch.save((seen, inputs), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_available() or not distributed.is_gloo_available(), reason="needs gloo")
def test_replicas_round_weights_alike_and_inputs_apart(tmp_path: Path) -> None:
    multiprocessing.spawn(_replica, (str(tmp_path), (1, 2)), nprocs=2)
    (first, inputs), (second, others) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert same_bits(first, second)
    assert not same_bits(first, first.round()), "the weight is rounded to halves, too"
    assert set(inputs.unique().tolist()) <= set(E2M1.values())
    assert not same_bits(inputs, others)
