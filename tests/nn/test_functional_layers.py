"""qsim.nn.functional compared with torch.nn.functional: the same without points; with them, the same on rounded operands."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import qsim
from qsim import FivePoint
from qsim.nn import functional
from support.comparing import same_bits
from support.functional_cases import (
    CONV,
    LINEAR,
    MATMUL,
    POINTS,
    TRANSPOSED,
    FunctionCase,
    cases,
    check,
    operands,
    oracle,
    results,
    rounded,
)

pytestmark = pytest.mark.usefixtures("plain_arithmetic")


@cases
@pytest.mark.parametrize("points", [None, FivePoint()], ids=["none", "identity"])
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_without_points_is_torchs_own(case: FunctionCase, points: FivePoint | None, device: torch.device) -> None:
    leaves = operands(case, device)
    own, torchs = results(lambda *tensors: case.own(points, *tensors), leaves), results(case.torchs, leaves)
    assert all(same_bits(a, b) for a, b in zip(own, torchs, strict=True))


@pytest.mark.sampled(3)
@cases
@pytest.mark.parametrize("name", POINTS)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_is_torchs_of_rounded_operands(case: FunctionCase, name: str, device: torch.device) -> None:
    check(case, operands(case, device), POINTS[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("case", [LINEAR[2], MATMUL[6], MATMUL[9], CONV[5], TRANSPOSED[2]], ids=str)
def test_keeps_other_dtypes(case: FunctionCase, dtype: torch.dtype, device: torch.device) -> None:
    # The points apply whatever the model's dtype; a product is rounded to it once.
    check(case, operands(case, device, dtype), POINTS["hybrid"])


@pytest.mark.parametrize("case", [LINEAR[2], MATMUL[3], CONV[4], TRANSPOSED[0]], ids=str)
@pytest.mark.parametrize("name", ["act", "weight", "act_bwd", "weight_bwd", "grad"])
def test_every_point_shows(case: FunctionCase, name: str, device: torch.device) -> None:
    # The bounds above are tight enough to detect any single missing point.
    if case.two_inputs and name.startswith("weight"):
        return
    leaves = operands(case, device)
    upstream = torch.randn(case.torchs(*leaves).shape, device=device)
    without, points = (
        oracle(case, leaves, upstream, FivePoint(), lambda x: x),
        FivePoint(**{"act_bwd": None, "weight_bwd": None, name: "e4m3"}),
    )
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


@pytest.mark.parametrize("function", ["linear", "conv2d", "conv_transpose1d", "matmul"])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(("dtype", "autocast"), [(torch.bfloat16, False), (torch.float64, False), (torch.float64, True)])
def test_operands_of_several_dtypes_are_refused_as_by_torch(function: str, which: int, dtype: torch.dtype, autocast: bool) -> None:
    case = {"linear": LINEAR[2], "conv2d": CONV[3], "conv_transpose1d": TRANSPOSED[0], "matmul": MATMUL[3]}[function]
    leaves = list(operands(case, torch.device("cpu")))
    if which >= len(leaves):
        return
    leaves[which] = leaves[which].detach().to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if which < 2:  # Whether torch takes a bias of another dtype depends on the processor: oneDNN's transposed convolution does.
            with pytest.raises(RuntimeError, match="type"):
                case.torchs(*leaves)
        kept = "bfloat16" if autocast else "float32"
        names = ", ".join(str(dtype).removeprefix("torch.") if i == which else kept for i in range(len(leaves)))
        with pytest.raises(TypeError, match=f"must be of one dtype, as in torch, got {names}: cast them, or use autocast"):
            case.own(POINTS["hybrid"], *leaves)


def test_layers_refuse_inputs_of_another_dtype() -> None:
    layer = qsim.convert(torch.nn.Linear(4, 4), FivePoint(act="e4m3", act_bwd=None))
    with pytest.raises(TypeError, match="must be of one dtype, as in torch, got bfloat16, float32, float32"):
        layer(torch.ones(2, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_operands_of_another_dtype_are_refused_after_calls_that_were_not(which: int) -> None:
    given = [torch.ones(2, 4), torch.ones(4, 4), torch.ones(4)]
    functional.linear(*given, POINTS["hybrid"])
    given[which] = given[which].bfloat16()
    with pytest.raises(TypeError, match="must be of one dtype"):
        functional.linear(*given, POINTS["hybrid"])


def test_autocast_hides_no_small_change_of_a_weight() -> None:
    # Rounded to bfloat16 first, this would be a tie, which rounds to 1.
    x, w = torch.ones(1, 1), torch.tensor([[1.0625 + 2**-12]])
    points = FivePoint(weight="e4m3", weight_bwd=None)
    with torch.autocast("cpu", torch.bfloat16):
        assert functional.linear(x, w, points=points).item() == functional.matmul(w, x, FivePoint(act="e4m3", act_bwd=None)).item() == 1.125


@pytest.mark.parametrize(
    "points",
    [FivePoint(act="e4m3", act_bwd=None), FivePoint(weight="e4m3", weight_bwd=None), FivePoint(grad="e4m3"), FivePoint(act_bwd="e4m3")],
    ids=str,
)
def test_autocast_makes_bfloat16_of_what_no_point_rounds_forward(points: FivePoint) -> None:
    a, w, _ = operands(LINEAR[2], torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        value = functional.linear(a, w, None, points)
    a, w = a if points.act else a.bfloat16().float(), w if points.weight else w.bfloat16().float()
    expected = F.linear(rounded(a, points.act).double(), rounded(w, points.weight).double())
    assert value.dtype == torch.bfloat16
    torch.testing.assert_close(value.double(), expected, rtol=2**-8, atol=2**-9)


def test_both_dtypes_of_autocast_in_turn_on_one_layer() -> None:
    """The layer keeps its plans: that of one dtype must not serve the other."""
    layer, x = qsim.nn.Linear(8, 4, points=qsim.FivePoint("e4m3", "e4m3")), torch.randn(3, 8)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            found, fresh = layer(x), copy.deepcopy(layer)(x)
        assert found.dtype == dtype
        assert torch.equal(found, fresh)
    assert layer(x).dtype == torch.float32
