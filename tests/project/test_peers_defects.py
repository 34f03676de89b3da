"""Defects found in other packages, each as a test that fails if the defect is present.

The test's name describes the defect, its docstring names the packages that have it.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings

import numpy as np
import pytest
import torch

import qsim
from qsim import Float, Quantizer, Stochastic
from qsim.formats import BF16, E2M1, E4M3, E5M2, FP16, FP32, Fixed, Int
from qsim.random import Noise, random_bits
from support import inputs
from support.bounds import check_share
from support.oracle_arrays import Bracket, mismatches, numbers

ROUNDINGS = ["nearest", "nearest_away", "nearest_up", "nearest_down", "toward_zero", "up", "down", "odd", "stochastic"]


def seeded(rounding: str) -> dict[str, int]:
    """The argument for a seed, where one is used."""
    return {"seed": 1} if rounding == "stochastic" else {}


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_nan_becomes_the_largest_number(rounding: str) -> None:
    """QPyTorch."""
    got = qsim.quantize(torch.tensor([math.nan, -math.nan]), E4M3, rounding=rounding, **seeded(rounding))
    assert got.isnan().all()


def test_infinity_becomes_the_largest_number_unasked() -> None:
    """QPyTorch, which cannot represent infinities."""
    got = qsim.quantize(torch.tensor([math.inf, -math.inf]), E5M2, overflow="nonfinite")
    assert got.tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize("fmt", [BF16, FP16, E5M2, E4M3, E2M1], ids=repr)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001])
def test_nan_payload_carries_into_the_exponent_or_the_sign(pattern: int, rounding: str, fmt: Float) -> None:
    """0x7FFFFFFF becomes −0.0 in QPyTorch, torchao and d9d, 0x7F800001 infinity in torchao and d9d."""
    x = inputs.from_bits([pattern] * 64, torch.float32)
    for overflow in ("saturate", "nonfinite"):
        assert qsim.quantize(x, fmt, rounding=rounding, overflow=overflow, **seeded(rounding)).isnan().all()  # type: ignore[arg-type]


def test_nearest_is_ties_away_or_ties_to_zero() -> None:
    """Away in QPyTorch and microxcaling, to zero in unit-scaling."""
    ties = torch.tensor([1.0625, 1.1875, -1.0625, -1.1875, 17.0, 19.0])
    assert qsim.quantize(ties, "e4m3").tolist() == [1.0, 1.25, -1.0, -1.25, 16.0, 20.0]


def test_top_exponent_is_used_as_values() -> None:
    """E5M10 reaches 131008 and E5M2 114688 in QPyTorch."""
    huge = torch.tensor([1e30, -1e30])
    assert qsim.quantize(huge, "fp16").tolist() == [65504.0, -65504.0]
    assert qsim.quantize(huge, "e5m2").tolist() == [57344.0, -57344.0]
    assert qsim.quantize(huge, "fp16", overflow="nonfinite").tolist() == [math.inf, -math.inf]
    assert qsim.quantize(huge, "e4m3").tolist() == [448.0, -448.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_disagrees_with_torchs_own_cast(dtype: torch.dtype) -> None:
    """QPyTorch issues 23 and 24: `tensor.half()` is the answer."""
    x = torch.cat([inputs.edges(qsim.format(dtype), torch.float32, 2**12), torch.randn(10_000)])
    x = x[~x.isnan()]
    assert torch.equal(qsim.quantize(x, dtype, overflow="nonfinite").view(torch.int32), x.to(dtype).float().view(torch.int32))


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16, E2M1, Float(4, 0), Float(3, 7)], ids=repr)
def test_subnormals_are_rounded_twice(fmt: Float) -> None:
    """QPyTorch; microxcaling just below half of the smallest."""
    grid = torch.arange(1, 2**fmt.mantissa + 1).double() - 0.5
    ties = (grid * fmt.smallest).float()
    x = torch.cat([torch.nextafter(ties, torch.tensor(0.0)), ties, torch.nextafter(ties, torch.tensor(math.inf))])
    got = qsim.quantize(x, fmt)
    assert not len(mismatches(got, Bracket(fmt, numbers(x)).round("nearest", "saturate")))
    below_half = torch.nextafter(torch.tensor(fmt.smallest / 2), torch.tensor(0.0))
    assert qsim.quantize(below_half, fmt).item() == 0.0


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1, FP16], ids=repr)
def test_tiny_values_never_round_up_under_stochastic_rounding(fmt: Float) -> None:
    """QPyTorch and MPTorch's binary8."""
    count = 2**18
    x = torch.full((count,), fmt.smallest / 1024)
    ups = int((qsim.quantize(x, fmt, rounding="stochastic", seed=0) == fmt.smallest).sum())
    assert ups > 0
    check_share(ups, count, 1 / 1024)


def test_negative_zero_and_tiny_negatives_lose_their_sign() -> None:
    """QPyTorch."""
    x = torch.tensor([-0.0, -1e-30, -1e-45])
    for rounding in ("nearest", "nearest_away", "nearest_up", "nearest_down", "toward_zero", "up"):
        got = qsim.quantize(x, "e4m3", rounding=rounding)
        assert got.tolist() == [0.0, 0.0, 0.0]
        assert got.signbit().all(), rounding


def test_23_mantissa_bits_shift_by_minus_one() -> None:
    """QPyTorch issue 48: `float_quantize(3.0, 8, 23)` is −3.0."""
    three = torch.tensor([3.0, -3.0])
    assert qsim.quantize(three, FP32).tolist() == [3.0, -3.0]
    assert qsim.quantize(three, Float(8, 23), dtype=torch.float64).tolist() == [3.0, -3.0]
    x = inputs.random_patterns(torch.float32, 10_000, seed=1)
    x = x[~x.isnan()]
    for rounding in ROUNDINGS:
        got = qsim.quantize(x, FP32, rounding=rounding, overflow="nonfinite", **seeded(rounding))
        assert torch.equal(got.view(torch.int32), x.view(torch.int32)), rounding


def test_fixed_point_ties_depend_on_the_device() -> None:
    """QPyTorch: even on CPU, away on CUDA."""
    ties = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5]) / 16
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        assert (qsim.quantize(ties.to(device), Fixed(8, 4)) * 16).tolist() == [0.0, 2.0, 2.0, 0.0, -2.0, -2.0]


@pytest.mark.parametrize("fmt", [Int(8), Fixed(8, 4), Fixed(16, 12), E4M3, E2M1], ids=repr)
def test_stochastic_rounding_moves_values_of_the_format(fmt: qsim.formats.Format) -> None:
    """QPyTorch's fixed point; torchao's int8."""
    values = torch.tensor(fmt.values()).repeat(1 + 2**16 // len(fmt.values()))
    for how in (Stochastic(), Stochastic(1), Stochastic(8, correction=True), Stochastic(32, correction=True)):
        assert torch.equal(qsim.quantize(values, fmt, rounding=how, seed=3), values), how


def test_manual_seed_has_no_effect() -> None:
    """QPyTorch on CPU."""
    x = torch.randn(1000)
    torch.manual_seed(1)
    a = qsim.quantize(x, "e4m3", rounding="stochastic")
    torch.manual_seed(1)
    b = qsim.quantize(x, "e4m3", rounding="stochastic")
    torch.manual_seed(2)
    c = qsim.quantize(x, "e4m3", rounding="stochastic")
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_every_layer_has_the_same_noise() -> None:
    """brevitas, with a fixed seed; llm.c 597, with one seed for many parameters."""
    x = torch.full((4096,), 1.0625)
    calls = [qsim.quantize(x, "e4m3", rounding="stochastic") for _ in range(4)]
    streams = [qsim.quantize(x, "e4m3", rounding="stochastic", seed=Noise(0, qsim.random.stream("layer", i))) for i in range(4)]
    for results in (calls, streams):
        for i, a in enumerate(results):
            for b in results[:i]:
                check_share(int((a == b).sum()), len(x), 0.5, tests=12)


def test_the_clock_is_the_seed() -> None:
    """MPTorch's matrix product."""
    x = torch.randn(1000)
    a = qsim.quantize(x, "e4m3", rounding="stochastic", seed=1)
    time.sleep(0.002)
    assert torch.equal(a, qsim.quantize(x, "e4m3", rounding="stochastic", seed=1))


@pytest.mark.parametrize("distance", [1, 25, 42, 67])
def test_streams_are_sums_that_collide(distance: int) -> None:
    """d9d derives two streams as seed + 42 and seed + 67, so two tensors whose seeds differ by 25 share noise."""
    assert not torch.equal(random_bits(64, 32, seed=7, stream=distance), random_bits(64, 32, seed=7 + distance, stream=0))
    assert not torch.equal(random_bits(64, 32, seed=7, stream=distance), random_bits(64, 32, seed=7, offset=distance))
    names = {qsim.random.stream(layer, point) for layer in range(100) for point in ("weight", "grad")}
    assert len(names) == 200
    assert not any(a + distance in names for a in names)
    assert qsim.random.stream("a", "bc") != qsim.random.stream("ab", "c")
    assert qsim.random.stream(1) != qsim.random.stream("1")


@pytest.mark.parametrize(("bits", "due"), [(1, 0), (2, 1), (3, 3), (6, 25), (8, 102)])
def test_few_random_bits_are_one_bit(bits: int, due: int) -> None:
    """MPTorch parses the mask as one bit: a fraction of 0.4 rounds up 30 %, or never."""
    count = 128 * 2**bits
    got = qsim.quantize(torch.full((count,), 1.4), Int(8), rounding=Stochastic(bits), seed=2)
    used = random_bits(count, bits, seed=2)
    assert set(used.tolist()) == set(range(2**bits))
    assert set(used[got == 2.0].tolist()) == set(range(2**bits - due, 2**bits))


def test_bfloat16_input_is_computed_in_bfloat16() -> None:
    """microxcaling's floor(log2) returns exponent 8 for 255."""
    assert qsim.quantize(torch.tensor([255.0, 127.5], dtype=torch.bfloat16), "e4m3").tolist() == [256.0, 128.0]
    x = inputs.every_pattern(torch.bfloat16)
    for rounding in ROUNDINGS[:-1]:
        narrow, wide = qsim.quantize(x, "e4m3", rounding=rounding), qsim.quantize(x.float(), "e4m3", rounding=rounding)
        same = (narrow.float() == wide) | (narrow.isnan() & wide.isnan())
        assert same.all(), rounding


@pytest.mark.parametrize("dtype", inputs.DTYPES)
@pytest.mark.parametrize("shape", [(4, 6), (), (0,), (3, 0, 2), (1,), (5, 1, 7)])
def test_shape_changes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """unit-scaling: bfloat16 of shape (4, 6) comes back as (4, 3). QPyTorch: empty tensors fail."""
    x = torch.randn(shape).to(dtype)
    for rounding in ("nearest", "stochastic"):
        got = qsim.quantize(x, "e4m3", rounding=rounding)
        assert (got.shape, got.dtype, got.stride()) == (x.shape, x.dtype, x.stride())
    assert qsim.encode(x, "e4m3").shape == x.shape
    assert qsim.quantize_(x.clone(), "e4m3").shape == x.shape


def test_rounding_is_lost_between_two_layers() -> None:
    """unit-scaling: "nearest" runs stochastic."""
    x = torch.randn(10_000)
    for rounding in ROUNDINGS:
        for overflow in ("saturate", "nonfinite"):
            spec = Quantizer("e4m1", rounding=rounding, overflow=overflow)  # type: ignore[arg-type]
            direct = qsim.quantize(x, "e4m1", rounding=rounding, overflow=overflow, **seeded(rounding))  # type: ignore[arg-type]
            assert torch.equal(spec(x, **seeded(rounding)), direct), (rounding, overflow)
    results = {
        rounding: qsim.quantize(x, "e4m1", rounding=rounding, **seeded(rounding))
        for rounding in ROUNDINGS
        if not rounding.startswith("nearest_")
    }
    for a in results:
        for b in results:
            assert torch.equal(results[a], results[b]) == (a == b), (a, b)


def test_overflow_gives_zero() -> None:
    """pychop."""
    x = torch.tensor([500.0, 1e10, 3e38, -500.0, -3e38])
    for rounding in ROUNDINGS:
        assert qsim.quantize(x, "e4m3", rounding=rounding, **seeded(rounding)).tolist() == [448.0, 448.0, 448.0, -448.0, -448.0]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_input_hits_an_unbound_variable(layout: torch.layout) -> None:
    """microxcaling."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the layout a beta
        x = torch.eye(3).to_sparse(layout=layout)
    for call in (qsim.quantize, qsim.quantize_, qsim.encode):
        with pytest.raises(TypeError, match=r"x must be dense, got layout torch\.sparse"):
            call(x, "e4m3")


def test_float64_is_rounded_by_way_of_float32() -> None:
    """QPyTorch and MPTorch do not support float64; a detour over float32 rounds twice."""
    x = inputs.double_rounding(E4M3)
    expected = Bracket(E4M3, numbers(x)).round("nearest", "saturate")
    detour = Bracket(E4M3, numbers(x.float())).round("nearest", "saturate")
    assert not np.array_equal(expected, detour)
    assert not len(mismatches(qsim.quantize(x, E4M3), expected))


def test_replicas_round_differently() -> None:
    """OneTrainer 804: with its own seed, results do not depend on earlier draws of each process."""
    x = torch.randn(1000)
    torch.manual_seed(1)
    a = qsim.quantize(x, "bf16", rounding="stochastic", seed=Noise(9, 4))
    torch.manual_seed(2)
    torch.randn(77)
    assert torch.equal(a, qsim.quantize(x, "bf16", rounding="stochastic", seed=Noise(9, 4)))
    before = torch.get_rng_state()
    qsim.quantize(x, "bf16", rounding="stochastic", seed=9)
    assert torch.equal(torch.get_rng_state(), before)


def test_shards_round_differently() -> None:
    """torchao 2296: the noise of a shard is that of its position in the whole."""
    x = torch.randn(10_001)
    whole = qsim.quantize(x, "bf16", rounding="stochastic", seed=1)
    for bounds in ([0, 5, 4096, 10_001], [0, 1, 2, 3, 9_999, 10_001]):
        pieces = [qsim.quantize(x[a:b], "bf16", rounding="stochastic", seed=Noise(1, offset=a)) for a, b in itertools.pairwise(bounds)]
        assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.gpu
def test_a_generator_of_another_device_is_taken() -> None:
    """brevitas 1294."""
    with pytest.raises(ValueError, match="generator is on"):
        qsim.quantize(torch.ones(3), "e4m3", rounding="stochastic", generator=torch.Generator("cuda"))
    x, generator = torch.full((1000,), 1.3, device="cuda"), torch.Generator("cuda").manual_seed(1)
    a, b = (qsim.quantize(x, "e4m3", rounding="stochastic", generator=generator) for _ in range(2))
    assert not torch.equal(a, b)


@pytest.mark.gpu
def test_kernels_run_on_the_default_stream() -> None:
    """QPyTorch: the result for a side stream's tensor must only wait for that stream."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.zeros(2**24, device="cuda")
        torch.cuda._sleep(10**7)
        x += 1.0625
        got = qsim.quantize(x, "e4m3")
    side.synchronize()
    assert (got == 1.0).all()


@pytest.mark.gpu
def test_the_current_device_is_changed() -> None:
    """QPyTorch: `cudaSetDevice` without restoring it."""
    last = torch.cuda.device_count() - 1
    before = torch.cuda.current_device()
    got = qsim.quantize(torch.ones(10, device=f"cuda:{last}"), "e4m3")
    assert got.device.index == last
    assert torch.cuda.current_device() == before
