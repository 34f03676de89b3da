"""Differences between `qsim.compat.qtorch` and QPyTorch: one test per line of the table, and errors for bad input."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qsim
from qsim.compat import qtorch
from qsim.compat.qtorch import BlockFloatingPoint, FixedPoint, FloatingPoint, Number
from qsim.compat.qtorch.auto_low import lower, sequential_lower
from qsim.compat.qtorch.quant import Quantizer, block_quantize, fixed_point_quantize, float_quantize, quantizer
from support.bounds import check_share

NUMBERS = [FixedPoint(8, 4), FixedPoint(8, 4, clamp=False), BlockFloatingPoint(8), BlockFloatingPoint(8, 0), FloatingPoint(4, 3)]


def test_numbers_can_be_changed_and_quantizers_read_them_at_every_call() -> None:
    """As in QPyTorch: each pass reads its number when it runs, and copies of a model share both numbers."""
    values, gradients = FixedPoint(8, 4), BlockFloatingPoint(8)
    quant = Quantizer(values, gradients, "nearest", "nearest")
    twin = copy.deepcopy(quant)
    x = torch.tensor([0.3, 100.0], requires_grad=True)
    assert quant(x).tolist() == [0.3125, 7.9375]
    values.wl, values.fl = 6, 2
    out = quant(x)
    assert out.tolist() == twin(x).tolist() == [0.25, 7.75]
    gradients.wl = 3
    out.backward(torch.tensor([0.3, 1.0]))
    assert x.grad is not None
    assert x.grad.tolist() == [0.5, 1.0]
    values.clamp = False
    assert quant(x).tolist() == [0.25, 100.0]
    assert "FixedPoint(wl=6, fl=2, clamp=False, symmetric=False), BlockFloatingPoint(wl=3, dim=-1)" in repr(twin)
    number = FloatingPoint(4, 3)
    number.exp, number.man = 5, 2
    assert number.format == qsim.Float(5, 2)
    gradients.dim = 0
    assert gradients.scale == qsim.scaling.Channel(0, "e8m0", "floor")


def test_changed_numbers_are_checked_and_keep_their_value_where_refused() -> None:
    number = FixedPoint(8, 4)
    for name, value, kind, words in [
        ("wl", 0, ValueError, r"FixedPoint: wl must lie in 1…256, got 0"),
        ("fl", 4.0, TypeError, r"FixedPoint: fl must be an int, got 4\.0"),
        ("clamp", 1, TypeError, r"FixedPoint: clamp must be True or False, got 1"),
    ]:
        with pytest.raises(kind, match=words):
            setattr(number, name, value)
    assert repr(number) == "FixedPoint(wl=8, fl=4, clamp=True, symmetric=False)"
    number.wl = 1
    with pytest.raises(ValueError, match="FixedPoint: wl must lie in 2…256, got 1"):
        number.symmetric = True
    with pytest.raises(ValueError, match="FloatingPoint: exp must lie in 1…8, got 9"):
        FloatingPoint(4, 3).exp = 9
    with pytest.raises(ValueError, match="BlockFloatingPoint: dim must lie in -1…63, got -2"):
        BlockFloatingPoint(8).dim = -2


def test_numbers_are_objects_of_their_own() -> None:
    """They are only equal to themselves and can be dictionary keys, as in QPyTorch; copies are separate and keep all parameters."""
    number = FixedPoint(8, 4, symmetric=True)
    assert number != FixedPoint(8, 4, symmetric=True)
    assert len({number, number, FixedPoint(8, 4, symmetric=True)}) == 2
    for other in (copy.copy(number), copy.deepcopy(number), pickle.loads(pickle.dumps(number))):
        other.wl = 6
        assert (number.wl, repr(other)) == (8, "FixedPoint(wl=6, fl=4, clamp=True, symmetric=True)")


def test_compiled_code_sees_changed_numbers() -> None:
    number, x = FixedPoint(8, 4), torch.randn(7, 9) * 10
    quant = quantizer(number, forward_rounding="nearest")
    compiled = torch.compile(quant, backend="aot_eager")
    for wl, fl in ((8, 4), (6, 3)):
        number.wl, number.fl = wl, fl
        assert torch.equal(compiled(x), quant(x))


def in_exact_words(x: Tensor, wl: int, fl: int, low: float, high: float) -> Tensor:
    """Round float32 to nearest in float64, where the division by a power of two is exact."""
    return (torch.round(x.double() * 2.0**fl) * 2.0**-fl).clamp(low, high).float()


def test_long_words_round_to_their_steps_and_to_limits_in_float32() -> None:
    """QPyTorch's limits; its values are `test_compat_qtorch_installed`'s."""
    scale = 2.0 ** torch.arange(-24, 24).repeat(50)
    x = torch.cat([torch.randn(2400) * scale, torch.tensor([40000.0, -40000.0, 32767.998, 8388609.0, math.inf, -math.inf, math.nan])])
    for wl, fl, symmetric, top in [(26, 10, False, 2.0**15), (32, 16, False, 2.0**15), (32, 16, True, 2.0**15), (200, 20, True, math.inf)]:
        leaf = x.clone().requires_grad_()
        got = fixed_point_quantize(leaf, wl, fl, True, symmetric, "nearest")
        assert torch.equal(got[:-1], in_exact_words(x, wl, fl, -top, top)[:-1])
        assert got[-1].isnan()
        got.backward(x)
        assert leaf.grad is not None
        assert torch.equal(leaf.grad[:-3], x[:-3])
    assert torch.equal(fixed_point_quantize(x[:-1].double(), 40, 16, rounding="nearest").abs().max(), torch.tensor(2.0**23).double())
    assert FixedPoint(40, 16).limits(torch.float64) == (-(2.0**23), 2.0**23 - 2.0**-16)
    quant = quantizer(FixedPoint(32, 16), forward_rounding="nearest", clamping_grad_zero=True)
    leaf = torch.tensor([0.3, 32768.0, 32772.0], requires_grad=True)
    quant(leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [1.0, 1.0, 0.0]


def test_long_words_in_blocks_are_rounded_once() -> None:
    """Steps of `2**(e + 2 - wl)` in a block whose largest magnitude has exponent `e`; QPyTorch shifts by negative numbers of bits there."""
    x = torch.randn(6, 400) * 2.0 ** torch.randint(-40, 1, (6, 400))
    x[4] *= 2.0**126
    x[5] *= 2.0**-100
    for wl, dim in ((26, -1), (26, 0), (30, 1), (60, 0), (256, 0)):
        leaf = x.clone().requires_grad_()
        got = block_quantize(leaf, wl, dim, "nearest")
        largest = x.double().abs().amax([d for d in (0, 1) if d != dim], keepdim=True)
        steps = 2.0 ** (torch.floor(torch.log2(largest)) + 2 - wl)
        assert torch.equal(got.double(), torch.round(x.double() / steps) * steps)
        drawn = block_quantize(x, wl, dim).double()
        assert ((drawn - x.double()).abs() < steps).all()
        got.backward(x)
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, x)
    x[0, 0], x[1, 0], x[2] = math.nan, math.inf, 0.0
    got = block_quantize(x, 26, 0, "nearest")
    assert got.isnan().all(1).tolist() == [True, True, False, False, False, False]
    assert got[2].eq(0).all()
    assert block_quantize(torch.tensor([1.9999999999, 2.0**-40], dtype=torch.float64), 33, rounding="nearest").tolist() == [
        2 - 2.0**-31,
        0.0,
    ]
    assert block_quantize(torch.ones(3, 0), 26, 0).shape == (3, 0)


def test_long_words_are_unbiased() -> None:
    x, count = 0.25 + 2.0**-24, 2**16
    ones = torch.full((count,), x)
    check_share(int((fixed_point_quantize(ones, 40, 23) > x).sum()), count, 0.5)
    block = torch.cat([ones * 2.0**-2, torch.tensor([1.5])])
    check_share(int((block_quantize(block, 27)[:-1] > x * 2.0**-2).sum()), count, 0.5)


def test_ties_go_to_even() -> None:
    ties = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    even = [0.0, 2.0, 2.0, 0.0, -2.0, -2.0]
    assert fixed_point_quantize(ties, 8, 0, rounding="nearest").tolist() == even
    assert fixed_point_quantize(ties, 8, 0, clamp=False, rounding="nearest").tolist() == even
    assert block_quantize(torch.cat([ties, torch.tensor([7.0])]), 4, rounding="nearest").tolist() == [*even, 7.0]
    assert float_quantize(1 + ties / 8, 4, 3, rounding="nearest").tolist() == [1.0, 1.25, 1.25, 0.9375, 0.8125, 0.6875]


def test_nan_and_infinities_stay_what_they_are() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 3.3e38, -3.3e38])
    for exp, man in [(4, 3), (5, 2), (8, 7), (8, 23), (1, 1)]:
        largest = FloatingPoint(exp, man).format.max
        for rounding in ("nearest", "stochastic"):
            nan, *others = float_quantize(x, exp, man, rounding).tolist()
            assert math.isnan(nan)
            big = min(largest, torch.tensor(3.3e38).item())
            if man < 23 and exp == 8:
                assert others[:2] == [math.inf, -math.inf]
                assert math.isfinite(others[2])
            else:
                assert others == [math.inf, -math.inf, big, -big]
    assert fixed_point_quantize(x, 8, 4, rounding="nearest").tolist()[1:3] == [7.9375, -8.0]
    assert fixed_point_quantize(x, 8, 4, rounding="nearest").isnan().tolist() == [True, False, False, False, False]
    free = fixed_point_quantize(x, 8, 4, clamp=False, rounding="nearest")
    assert free.isnan().tolist() == [True, False, False, False, False]
    assert torch.equal(free[1:], x[1:])
    rows = block_quantize(torch.tensor([[math.inf, 1.0], [math.nan, 1.0], [3.0, 1.0]]), 8, 0)
    assert rows.isnan().tolist() == [[True, True], [True, True], [False, False]]


def test_subnormals_and_blocks_are_rounded_once() -> None:
    """Numbers just beyond a tie, which an addition in float32 turns into a tie."""
    assert float_quantize(torch.tensor([-0.014526366256177425]), 3, 10, "nearest").item() == -59 * 2.0**-12
    assert float_quantize(torch.tensor([0.07958979159593582]), 2, 10, "nearest").item() == 81 * 2.0**-10
    assert block_quantize(torch.tensor([-140.00086975097656, 4095.0]), 12, rounding="nearest")[0].item() == -140.0
    block = torch.tensor([8.999689102172852, 1000.0])
    assert block_quantize(block, 10, rounding="nearest")[0].item() == 8.0


def test_tiny_numbers_are_rounded_up_sometimes() -> None:
    number, count = FloatingPoint(5, 2), 2**18
    x = torch.full((count,), number.format.smallest / 1024)
    check_share(int((number.round(x) == number.format.smallest).sum()), count, 1 / 1024)


def test_negative_zeros_keep_their_sign() -> None:
    assert float_quantize(torch.tensor([-0.0, -1e-30]), 4, 3, "nearest").signbit().all()


@pytest.mark.parametrize("number", [FixedPoint(8, 4), FixedPoint(8, 4, clamp=False), FixedPoint(8, 4, symmetric=True), FloatingPoint(4, 3)])
def test_values_of_the_format_never_move(number: Number) -> None:
    values = torch.tensor(number.format.values()).repeat(100)
    assert torch.equal(number.round(values, "stochastic"), values)


def test_23_bits_of_mantissa_leave_float32_alone() -> None:
    x = torch.randn(1000) * 2.0 ** torch.arange(-100, 100).repeat(5)
    for rounding in ("nearest", "stochastic"):
        assert torch.equal(float_quantize(x, 8, 23, rounding), x)


def test_the_top_exponent() -> None:
    assert [FloatingPoint(*at).format.max for at in ((4, 3), (5, 2), (5, 10))] == [480.0, 114688.0, 131008.0]
    assert FloatingPoint(8, 7).format == qsim.format("bf16")
    x = torch.randn(10_000)
    assert torch.equal(float_quantize(x, 8, 7, "nearest"), x.bfloat16().float())


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_seeds_make_results_reproducible(number: Number) -> None:
    x, quant = torch.randn(1000), quantizer(number, number)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        leaf = x.clone().requires_grad_()
        out = quant(leaf)
        out.backward(x / 3)
        outputs.append((out.detach(), leaf.grad, number.round(x)))
    for a, b, c in zip(*outputs, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    assert not torch.equal(outputs[0][0], outputs[0][2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("number", [FixedPoint(6, 4), FixedPoint(6, 4, clamp=False), BlockFloatingPoint(6), FloatingPoint(4, 3)], ids=repr)
def test_other_dtypes(number: Number, dtype: torch.dtype) -> None:
    x = torch.randn(50, 7).to(dtype).t()
    got = number.round(x, "nearest")
    assert (got.dtype, got.shape) == (dtype, x.shape)
    assert isinstance(number, BlockFloatingPoint) or got.stride() == x.stride()
    assert torch.equal(got.double(), number.round(x.double(), "nearest"))
    assert not torch.equal(got, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_fixed_point_that_does_not_clamp_is_exact_at_any_size(dtype: torch.dtype) -> None:
    x = (torch.randn(4000) * 2.0 ** torch.arange(-10, 10).repeat(200)).to(dtype)
    got = fixed_point_quantize(x, 4, 3, clamp=False, rounding="nearest")
    assert torch.equal(got.double(), torch.round(x.double() * 8) / 8)
    drawn = fixed_point_quantize(x, 4, 3, clamp=False).double()
    assert torch.equal(drawn * 8, torch.round(drawn * 8))
    assert ((drawn - x.double()).abs() < 0.125).all()


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (1, 1)])
def test_empty_tensors(shape: tuple[int, ...], number: Number) -> None:
    x = torch.ones(shape, requires_grad=True)
    got = quantizer(number, number)(x)
    got.sum().backward()
    assert got.shape == shape
    assert x.grad is not None
    assert x.grad.shape == shape


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_functions_pass_gradients_straight_through(number: Number) -> None:
    x = (torch.randn(100) * 100).requires_grad_()
    number.round(x).backward(torch.arange(100.0))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.arange(100.0))


def test_clamping_grad_zero_and_hooks_whatever_else_there_is() -> None:
    x = torch.tensor([0.3, 9.0, -9.0], requires_grad=True)
    quantizer(FixedPoint(4, 2), clamping_grad_zero=True)(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 0.0, 0.0]
    x.grad = None
    quantizer(backward_hooks=[lambda g: g + 1, lambda g: g * 3])(x).sum().backward()
    assert x.grad.tolist() == [6.0, 6.0, 6.0]
    x.grad = None
    number = FloatingPoint(4, 1)
    quantizer(None, number, backward_rounding="nearest", clamping_grad_zero=True, backward_hooks=[lambda g: g * 1.3])(x).sum().backward()
    assert x.grad.tolist() == [1.5, 1.5, 1.5]


def test_a_quantizer_of_nothing_is_the_identity() -> None:
    x = torch.randn(5, requires_grad=True)
    before = torch.get_rng_state()
    got = quantizer()(x)
    got.backward(x.detach())
    assert torch.equal(got, x)
    assert torch.equal(x.grad, x)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)


def test_quantizers_are_copied_and_pickled() -> None:
    quant = Quantizer(FloatingPoint(4, 3), FloatingPoint(5, 2))
    x = torch.randn(100)
    for other in (copy.deepcopy(quant), pickle.loads(pickle.dumps(quant))):
        torch.manual_seed(3)
        a = quant(x)
        torch.manual_seed(3)
        assert torch.equal(a, other(x))


def test_checkpoints_replay_the_noise() -> None:
    quant = quantizer(FloatingPoint(4, 1), FloatingPoint(4, 1))
    gradients = []
    for run in (lambda x: quant(x) ** 2, lambda x: checkpoint(lambda x: quant(x) ** 2, x, use_reentrant=False)):
        torch.manual_seed(0)
        x = torch.linspace(-3, 3, 1000, requires_grad=True)
        run(x).sum().backward()  # type: ignore[union-attr]
        gradients.append(x.grad)
    assert torch.equal(*gradients)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_compiled_code_rounds_alike(number: Number) -> None:
    x = torch.randn(7, 9) * 10
    compiled = torch.compile(lambda x: number.round(x, "nearest"), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), number.round(x, "nearest"))
    quant = quantizer(number, number, "nearest", "nearest")
    outputs = []
    for call in (quant, torch.compile(quant, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        got = call(leaf)
        got.backward(x / 3)
        assert leaf.grad is not None
        outputs.append(torch.stack([got.detach(), leaf.grad]))
    assert torch.equal(*outputs)


class Net(nn.Module):
    """Two stacks, a list, and one layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 3, 3), nn.GELU(), nn.Identity(), nn.Flatten())
        self.heads = nn.ModuleDict({"a": nn.Linear(3 * 36, 5), "b": nn.ModuleList([nn.Linear(5, 5)])})
        self.again = self.heads["a"]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.features(x)
        return self.heads["b"][0](self.heads["a"](hidden) + self.again(hidden))  # type: ignore[index,no-any-return]


def by_hand(net: Net, quant: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    conv, activation, _, flatten = net.features
    hidden = flatten(quant(activation(quant(conv(x)))))
    both = quant(net.heads["a"](hidden)) + quant(net.again(hidden))
    return quant(net.heads["b"][0](both))  # type: ignore[index]


def test_lower_and_sequential_lower_round_the_output_of_each_layer() -> None:
    net, x = Net(), torch.randn(4, 1, 8, 8)
    how: Any = {"layer_types": ["conv", "linear", "activation"], "forward_number": FloatingPoint(4, 2), "forward_rounding": "nearest"}
    plain = net(x)
    expected = by_hand(net, Quantizer(FloatingPoint(4, 2), forward_rounding="nearest"), x)
    lowered = sequential_lower(net, **how)
    assert torch.equal(net(x), plain)
    assert not torch.equal(plain, expected)
    assert torch.equal(lowered(x), expected)
    assert repr(lowered.features[0]).startswith("Sequential(\n  (0): Conv2d")  # type: ignore[index]
    assert lowered.again is lowered.heads["a"]  # type: ignore[index]
    assert isinstance(lowered.features[2], nn.Identity)  # type: ignore[index]
    names = list(net.state_dict())
    lower(net, **how)
    assert torch.equal(net(x), expected)
    assert list(net.state_dict()) == names


def test_sequential_lower_of_a_single_layer() -> None:
    lowered = sequential_lower(nn.ReLU(), ["activation"], FixedPoint(4, 2), forward_rounding="nearest")
    assert lowered(torch.tensor([0.3, -1.0, 9.0])).tolist() == [0.25, 0.0, 1.75]


def test_a_copy_of_a_lowered_model_is_a_model_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    lower(model, ["linear"], FixedPoint(4, 2), forward_rounding="nearest")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight.zero_()
        twin[0].weight.copy_(torch.tensor([[0.3, 0.0], [0.0, 9.0]]))
    assert twin(torch.ones(2)).tolist() == [0.25, 1.75]
    assert model(torch.ones(2)).tolist() == [0.0, 0.0]


def test_modules_are_where_they_are_in_qtorch() -> None:
    from qsim.compat.qtorch.auto_low.auto_low import lower as as_there
    from qsim.compat.qtorch.optim.optim_low import OptimLP
    from qsim.compat.qtorch.quant.quant_function import quantizer as function
    from qsim.compat.qtorch.quant.quant_module import Quantizer

    assert qtorch.quant.quantizer is function
    assert qtorch.quant.Quantizer is Quantizer
    assert qtorch.auto_low.lower is as_there
    assert qtorch.optim.OptimLP is OptimLP
    assert issubclass(qtorch.FixedPoint, qtorch.Number)


ERRORS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: FixedPoint(0, 4), ValueError, r"FixedPoint: wl must lie in 1…256, got 0"),
    (lambda: FixedPoint(257, 4), ValueError, r"FixedPoint: wl must lie in 1…256, got 257"),
    (lambda: FixedPoint(1, 4, symmetric=True), ValueError, r"FixedPoint: wl must lie in 2…256, got 1"),
    (lambda: FixedPoint(8.0, 4), TypeError, r"FixedPoint: wl must be an int, got 8\.0"),  # type: ignore[arg-type]
    (lambda: FixedPoint(8, 100), ValueError, r"FixedPoint: fl must lie in -64…64, got 100"),
    (lambda: FixedPoint(8, 4, clamp=1), TypeError, r"FixedPoint: clamp must be True or False, got 1"),  # type: ignore[arg-type]
    (lambda: FixedPoint(8, 4, symmetric=0), TypeError, r"FixedPoint: symmetric must be True or False, got 0"),  # type: ignore[arg-type]
    (lambda: FloatingPoint(9, 3), ValueError, r"FloatingPoint: exp must lie in 1…8, got 9"),
    (lambda: FloatingPoint(4, 24), ValueError, r"FloatingPoint: man must lie in 0…23, got 24"),
    (lambda: BlockFloatingPoint(1), ValueError, r"BlockFloatingPoint: wl must lie in 2…256, got 1"),
    (lambda: BlockFloatingPoint(8, -2), ValueError, r"BlockFloatingPoint: dim must lie in -1…63, got -2"),
    (lambda: block_quantize(torch.ones(3), 8, dim=1), IndexError, r"no dimension 1 in a tensor of shape \(3,\)"),
    (lambda: float_quantize(torch.ones(3), 4, 3, rounding="nearset"), ValueError, r"unknown rounding 'nearset': did you mean 'nearest'\?"),
    (lambda: float_quantize([1.0], 4, 3), TypeError, r"x must be a tensor, got list"),  # type: ignore[arg-type]
    (lambda: float_quantize(torch.ones(3, dtype=torch.int64), 4, 3), TypeError, r"x must be float32, .* got torch\.int64"),
    (lambda: float_quantize(torch.ones(3).half(), 8, 7), ValueError, r"float16 cannot hold every value of Float\(8, 7"),
    (lambda: float_quantize(torch.ones(3), 32, 3), ValueError, r"float_quantize: exp must lie in 1…31, got 32"),
    (lambda: float_quantize(torch.ones(3).double(), 9, 3), ValueError, r"float_quantize: exp must be in 1…8 for float64, .* got 9"),
    (lambda: float_quantize(torch.ones(3).half(), 9, 3), ValueError, r"float16 cannot hold every value of Float\(8, 3"),
    (lambda: fixed_point_quantize(torch.ones(3).half(), 32, 16), ValueError, r"float16 cannot hold every value of Fixed\(32, 16\)"),
    (
        lambda: fixed_point_quantize(torch.ones(3).half(), 40, 16),
        ValueError,
        r"FixedPoint: .*float16 cannot hold words of 40 bits; float32 and",
    ),
    (lambda: block_quantize(torch.ones(3).bfloat16(), 40), ValueError, r"BlockFloatingPoint: .*bfloat16 cannot hold words of 40 bits; "),
    (lambda: block_quantize(torch.ones(3), 40, dim=1), IndexError, r"no dimension 1 in a tensor of shape \(3,\)"),
    (lambda: fixed_point_quantize([1.0], 8, 4, clamp=False), TypeError, r"FixedPoint: x must be a tensor, got list"),  # type: ignore[arg-type]
    (lambda: quantizer("fp8"), TypeError, r"quantizer: forward_number must be a FixedPoint, .* got 'fp8'"),  # type: ignore[arg-type]
    (lambda: quantizer(None, 8), TypeError, r"quantizer: backward_number must be a FixedPoint, .* got 8"),  # type: ignore[arg-type]
    (lambda: quantizer(None, None, "up", "upwards"), ValueError, r"unknown rounding 'upwards'"),
    (lambda: quantizer(backward_hooks=[3]), TypeError, r"quantizer: backward_hooks must be functions, got 3"),  # type: ignore[list-item]
    (lambda: quantizer(clamping_grad_zero=1), TypeError, r"clamping_grad_zero must be True or False, got 1"),  # type: ignore[arg-type]
    (lambda: quantizer(FloatingPoint(4, 3), clamping_grad_zero=True), ValueError, r"is for a FixedPoint with clamp=True, got .*Floating"),
    (lambda: quantizer(FixedPoint(4, 3, clamp=False), clamping_grad_zero=True), ValueError, r"is for a FixedPoint with clamp=True, got"),
    (lambda: quantizer(FixedPoint(4, 3))(3.0), TypeError, r"quantizer: x must be a tensor, got float"),  # type: ignore[arg-type]
    (lambda: lower(nn.ReLU(), ["relu"]), ValueError, r"lower: layer_types must be of 'conv', .*'loss', got 'relu'"),
    (lambda: lower(nn.ReLU(), "conv"), TypeError, r"lower: layer_types must be a list of names, got the text 'conv'"),
    (lambda: sequential_lower(torch.relu), TypeError, r"sequential_lower: model must be a torch\.nn\.Module, got"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "kind", "words"), ERRORS, ids=[words for *_, words in ERRORS])
def test_errors(call: Callable[[], object], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


def test_gradients_of_gradients_are_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(quantizer(FloatingPoint(4, 3))(x).sum(), x, create_graph=True)
