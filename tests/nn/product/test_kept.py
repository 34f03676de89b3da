"""Computation and saved tensors of a product's backward pass: no more than needed, and narrow if possible."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import qsim
from qsim import FivePoint, Float, Int, Quantizer
from qsim.formats import E2M1, E4M3, Format
from qsim.nn.product.arithmetic import Arithmetic
from qsim.nn.product.bilinear import LinearProduct
from qsim.nn.product.tensors import ACT
from qsim.random import Noise, seeds
from support import compilers
from support.comparing import same_bits
from support.points import in_order
from support.written_out import (
    CASES,
    POINTS,
    ProductCase,
    ProductSetting,
    five_point_product,
    linear,
    operands,
)


class Operators(TorchDispatchMode):
    """Record the operators that run."""

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
    setting = ProductSetting(POINTS["clipped"], CASES[case].product, CASES[case].two_inputs)
    torch.manual_seed(2)
    expected = five_point_product(a, w, bias[0] if bias else None, setting)
    torch.manual_seed(2)
    with torch.no_grad(), Operators() as ran:
        found = five_point_product(a, w, bias[0] if bias else None, setting)
    assert same_bits(found, expected)
    assert ran.names.count("qsim::quantize") == 2
    forbidden = ("encode", "clone", "copy", "lt", "gt", "bitwise_or")
    assert not [name for name in ran.names if any(word in name.split("::")[1] for word in forbidden)], ran.names


def kept(points: FivePoint, case: ProductCase, given: tuple[Tensor, ...]) -> list[Tensor]:
    """The tensors saved for the backward pass, except seeds."""
    found: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        found.append(x)
        return x

    a, w, *bias = given
    with saved_tensors_hooks(pack, lambda x: x):
        y = five_point_product(a, w, bias[0] if bias else None, ProductSetting(points, case.product, case.two_inputs))
    assert y.grad_fn is not None
    return [x for x in found if x.dim()]


@pytest.mark.parametrize("fmt", [E4M3, Float(4, 3, specials="none"), Int(8), Int(4)], ids=repr)
@pytest.mark.parametrize("act", [None, "e4m3", "e5m2"])
def test_narrow_inputs_are_kept_as_codes(device: torch.device, fmt: Format, act: str | None) -> None:
    a, w, _ = given = operands(linear(5, 7), torch.float32, device)
    codes, weight = kept(FivePoint(act, "e4m3", act_bwd=Quantizer(fmt), weight_bwd="e4m3", grad="e5m2"), linear(5, 7), given)
    assert same_bits(codes, qsim.encode(a.detach(), fmt, check=False))
    assert codes.dtype == torch.uint8
    assert weight.data_ptr() == w.data_ptr(), "the weight is there anyway"


@pytest.mark.parametrize("fmt", [E4M3, E2M1, Float(4, 1), Float(4, 0), Float(4, 1, signed=False), Float(3, 2, subnormals=False)], ids=repr)
@pytest.mark.parametrize("act", [None, "e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_codes_decode_to_the_rounded_values(device: torch.device, fmt: Format, act: str | None, dtype: torch.dtype) -> None:
    """Including NaN, for which many narrow formats have no code."""
    values = [*fmt.values(), 1.3, -2.7, 1e-9, -0.0, math.inf, -math.inf, math.nan]
    a = torch.tensor([values], dtype=dtype, device=device)
    w = torch.ones(2, len(values), dtype=dtype, device=device, requires_grad=True)
    setting = ProductSetting(FivePoint(act, None, act_bwd=Quantizer(fmt)), LinearProduct())
    y = five_point_product(a, w, None, setting)
    assert torch.uint8 in [x.dtype for x in y.grad_fn.saved_tensors if x is not None]  # type: ignore[union-attr]
    (grad,) = torch.autograd.grad(y, w, torch.tensor([[1.0, 0.0]], dtype=dtype, device=device))
    assert torch.equal(grad[0].nan_to_num(nan=-77), qsim.quantize(a[0], fmt).nan_to_num(nan=-77))


def test_the_same_rounding_is_saved_as_its_codes(device: torch.device) -> None:
    given = operands(linear(5, 7), torch.float32, device)
    torch.manual_seed(4)
    codes, _ = kept(POINTS["same"], linear(5, 7), given)
    torch.manual_seed(4)
    seed = seeds.seed_tensor(None, None, device)
    assert same_bits(codes, qsim.encode(given[0].detach(), "e4m3", rounding="stochastic", seed=Noise(seed, ACT)))


@pytest.mark.parametrize("points", ["act", "wide", "same, wide", "same as nothing"])
def test_values_without_narrow_codes_are_saved_unchanged(device: torch.device, points: str) -> None:
    a, w, _ = given = operands(linear(5, 7), torch.float32, device)
    assert [x.data_ptr() for x in kept(POINTS[points], linear(5, 7), given)] == [a.data_ptr(), w.data_ptr()]


def test_a_second_input_is_kept_as_the_first_is(device: torch.device) -> None:
    case = CASES["matmul"]
    given = operands(case, torch.bfloat16, device)
    assert [(x.dtype, x.shape) for x in kept(FivePoint("e4m3", None, act_bwd="e2m1"), case, given)] == [
        (torch.uint8, x.shape) for x in given
    ]


def test_only_what_gradients_need_is_kept(device: torch.device) -> None:
    a, w, _ = operands(linear(5, 7), torch.float32, device)
    assert [x.dtype for x in kept(POINTS["all"], linear(5, 7), (a.detach(), w))] == [torch.uint8]
    assert [x.data_ptr() for x in kept(POINTS["all"], linear(5, 7), (a, w.detach()))] == [w.data_ptr()]


def test_a_weight_changed_before_the_backward_pass_is_noticed(device: torch.device) -> None:
    a, w, _ = operands(linear(5, 7), torch.float32, device)
    y = five_point_product(a, w, None, ProductSetting(POINTS["all"], LinearProduct()))
    with torch.no_grad():
        w.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    "points",
    [FivePoint("e4m3", "e4m3", act_bwd="e4m3", weight_bwd="e4m3", grad="e5m2"), FivePoint(weight_bwd="e4m3", grad="e5m2", grad_w="e4m3")],
)
def test_one_product_has_gone_when_the_other_is_made(points: FivePoint) -> None:
    first: list[ref[Tensor]] = []
    alive: list[int] = []

    class Spy(LinearProduct):
        def grad_a(self, g: Tensor, w: Tensor, a_shape: torch.Size, how: Arithmetic) -> Tensor:
            first.extend([ref(w), ref(g)] if points.grad_w else [ref(w)])
            return super().grad_a(g, w, a_shape, how)

        def grad_w(self, g: Tensor, a: Tensor, w_shape: torch.Size, how: Arithmetic) -> Tensor:
            alive.append(sum(operand() is not None for operand in first))
            return super().grad_w(g, a, w_shape, how)

    a, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    five_point_product(a, w, None, ProductSetting(points, Spy())).sum().backward()
    assert alive == [0]


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [compilers.inductor, compilers.another])
@pytest.mark.parametrize("recipe", [in_order(*["e4m3"] * 5), "fp8_hybrid"], ids=["nearest", "scaled"])
def test_compiled_code_keeps_no_rounded_weights(recipe: FivePoint | str, compiler: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    model = qsim.convert(nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24)), recipe)
    graphs: list[torch.fx.Graph] = []
    torch.compile(model, backend=compiler(graphs))(torch.randn(5, 24)).sum().backward()
    (output,) = graphs[0].find_nodes(op="output")
    kept = [tuple(node.meta["val"].shape) for node in output.args[0] if node.op != "placeholder"]
    assert (5, 24) in kept
    assert not {(24, 40), (40, 24)} & set(kept)
    torch._dynamo.reset()
