"""Codes under scales: bytes as in the standards, which decode bit for bit to the result of `quantize`."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import qsim
from qsim import Block, Stochastic
from qsim.formats import BF16, E2M1, E2M3, E4M3, E5M2, E8M0, FP16, Float, Int
from qsim.functional import ScaledCodes
from qsim.random import Noise
from qsim.scaling import NAMED, PerAxis, PerBlock, PerTensor, PerTile, Scaling
from support.comparing import first_difference, same_bits
from support.scaled_cases import DIFFERENT, SCALINGS, hard

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROUNDINGS = [
    "nearest",
    "nearest_away",
    "nearest_up",
    "nearest_down",
    "toward_zero",
    "up",
    "down",
    "odd",
    "stochastic",
    Stochastic(5, correction=True),
]


def check(x: Tensor, format: Any, packed: bool = False, overflow: str = "saturate", **how: Any) -> ScaledCodes:
    """Decode the codes, and compare with `quantize`."""
    drawn = {"rounding": how.pop("rounding", "nearest"), "overflow": overflow, "seed": Noise(9, 4, 7)}
    if drawn["rounding"] not in ("stochastic",) and not isinstance(drawn["rounding"], Stochastic):
        drawn["seed"] = Noise(None, 4, 7)
    encoded = qsim.encode(x, format, packed=packed, **how, **drawn)
    decoded = qsim.decode(encoded, format, packed=packed, overflow=overflow, dtype=x.dtype, **how)
    expected = qsim.quantize(x, format, **how, **drawn)
    assert same_bits(decoded, expected), f"{format}, {how}, {drawn}: {first_difference(x, decoded, expected)}"
    return encoded


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DIFFERENT)
def test_block_formats(name: str, dtype: torch.dtype, rounding: Any) -> None:
    x = hard(37, 70, dtype)
    for dim in (0, 1):
        check(x, name, rounding=rounding, dim=dim)
    if NAMED[name].element.has_nan:
        check(x, name, rounding=rounding, overflow="nonfinite")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("element", [E2M1, E4M3, E5M2, Int(8)], ids=repr)
def test_scales(scaling: Scaling, element: Any, dtype: torch.dtype) -> None:
    for rounding in ("nearest", "stochastic"):
        check(hard(13, 22, dtype)[1:], element, rounding=rounding, scale=scaling)


@pytest.mark.parametrize("shape", [(3, 5, 40), (2, 1, 64), (4, 3, 2, 36), (64,), (1,), (), (0,), (3, 0), (0, 8)])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxfp6"])
def test_shapes(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    size = NAMED[name].size
    for dim in range(-len(shape), len(shape)) if shape else (0, -1):
        encoded = check(x, name, dim=dim)
        counts = list(shape)
        if shape:
            counts[dim] = -(-counts[dim] // size)
        assert tuple(encoded.scales.shape) == tuple(counts)
        if shape and shape[-1] % 4 == 0:
            packed = check(x, name, dim=dim, packed=True)
            assert same_bits(packed.scales, encoded.scales)
            bits = NAMED[name].element.bits
            assert tuple(packed.codes.shape) == (*shape[:-1], shape[-1] * bits // 8)


def test_shapes_of_scales_go_with_the_tensor() -> None:
    x = torch.randn(4, 6, 10)
    shapes = {
        PerTensor(): (1, 1, 1),
        PerAxis(0): (4, 1, 1),
        PerAxis(1): (1, 6, 1),
        PerBlock(4, dim=1): (4, 2, 10),
        PerTile(4, 3): (4, 2, 4),
    }
    for scaling, shape in shapes.items():
        encoded = check(x, "e4m3", scale=scaling)
        assert tuple(encoded.scales.shape) == shape == scaling.counts(x.shape)
        assert encoded.scales.dtype == torch.float32
    # Scales of one or of all values of a dimension broadcast: decoding multiplies elements and scales.
    encoded = qsim.encode(x, "e4m3", scale=PerAxis(1))
    assert torch.equal(qsim.decode(encoded.codes, "e4m3") * encoded.scales, qsim.quantize(x, "e4m3", scale=PerAxis(1)))


def test_bytes_of_a_block_by_hand() -> None:
    # The largest is 57 = 1.78 * 2**5, E4M3 reaches 2**8: the scale is 2**-3, of code 124. 57 * 8 = 456 saturates: 0x7E. 1.5 * 8 = 12.
    encoded = qsim.encode(torch.tensor([57.0, -1.5, 0.0, 2.0**-12]), "mxfp8")
    assert encoded.scales.tolist() == [124]
    assert encoded.codes.tolist() == [0x7E, 0xD4, 0x00, 0x01]
    assert encoded.outer is None
    # With a scale of the whole tensor: 2688 = 6 * 448, so that this one is 1.
    encoded = qsim.encode(torch.tensor([2688.0, -448.0] + [0.0] * 14 + [12.0, 1.0]), "nvfp4", packed=True)
    assert encoded.outer is not None
    assert encoded.outer.item() == 1
    assert encoded.scales.tolist() == [0x7E, 0x40]
    assert encoded.codes.tolist() == [0xA7, 0, 0, 0, 0, 0, 0, 0, 0x17]


@pytest.mark.parametrize(("fmt", "theirs"), [("e8m0", ml_dtypes.float8_e8m0fnu), ("e4m3", ml_dtypes.float8_e4m3fn)])
def test_scales_are_bytes_of_known_dtypes(fmt: str, theirs: type) -> None:
    encoded = qsim.encode(hard(40, 64), "e2m1", scale=PerBlock(8, format=fmt))
    values = torch.from_numpy(encoded.scales.numpy().view(theirs).astype(np.float32))
    assert values[-1, 0].isnan()
    assert (values[:-9].nan_to_num(1) > 0).all()
    elements = qsim.decode(encoded.codes, "e2m1").view(40, 8, 8)
    expected = qsim.quantize(hard(40, 64), "e2m1", scale=PerBlock(8, format=fmt))
    assert torch.equal((elements * values[..., None]).view(40, 64).nan_to_num(7), expected.nan_to_num(7))


def test_torchs_own_dtypes_read_the_codes() -> None:
    x = hard(20, 64)[:-1]
    encoded = qsim.encode(x, "mxfp8")
    values = encoded.codes.view(torch.float8_e4m3fn).float().view(19, 2, 32) * encoded.scales.view(torch.float8_e8m0fnu).float()[..., None]
    assert torch.equal(values.view(19, 64).nan_to_num(7), qsim.quantize(x, "mxfp8").nan_to_num(7))


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", DIFFERENT)
def test_what_is_not_finite(name: str, bad: float) -> None:
    x = torch.ones(300)
    x[3] = bad
    if isinstance(NAMED[name].size, tuple):
        x = x[None]
    encoded = qsim.encode(x, name)
    assert encoded.scales.view(-1)[0] == (0x7F if name == "nvfp4" else 0xFF)
    element = NAMED[name].element
    assert (encoded.codes.view(-1)[:16] == (0x7F if element.has_nan else qsim.encode(torch.tensor(element.max), element))).all()
    again = replace(encoded, codes=torch.zeros_like(encoded.codes))
    assert same_bits(qsim.decode(again, name).isnan(), qsim.decode(encoded, name).isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_decoding_into_other_dtypes(dtype: torch.dtype) -> None:
    x = hard(20, 64)
    encoded = qsim.encode(x, "mxfp4")
    assert same_bits(qsim.decode(encoded, "mxfp4", dtype=dtype), qsim.quantize(x, "mxfp4", dtype=dtype))
    # In float64 the product of element and scale is exact; float32 rounds it.
    scaled = qsim.encode(x, "e4m3", scale=PerAxis(0))
    exact = qsim.decode(scaled, "e4m3", scale=PerAxis(0), dtype=torch.float64)
    assert torch.equal(exact.float().nan_to_num(7), qsim.quantize(x, "e4m3", scale=PerAxis(0)).nan_to_num(7))


def test_layouts() -> None:
    x = torch.randn(4, 6, 8, 10)
    for other in (x.to(memory_format=torch.channels_last), x.transpose(1, 3).contiguous().transpose(1, 3), x.expand(4, 6, 8, 10)):
        for dim in range(4):
            a, b = qsim.encode(x, "nvfp4", dim=dim), qsim.encode(other, "nvfp4", dim=dim)
            assert all(same_bits(p, q) for p, q in zip(a, b, strict=True))
            strided = ScaledCodes(*(part.transpose(0, -1).contiguous().transpose(0, -1) for part in (a.codes, a.scales)), a.outer)
            assert same_bits(qsim.decode(strided, "nvfp4", dim=dim), qsim.quantize(x, "nvfp4", dim=dim))


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIFFERENT)
def test_a_gpu_gives_the_same_without_waiting(name: str) -> None:
    x, seed = hard(37, 70), torch.tensor(5)
    how: dict[str, Any] = {"rounding": "stochastic", "dim": 0}
    expected = qsim.encode(x, name, seed=seed, **how)
    values = qsim.quantize(x, name, seed=seed, **how)
    y, number = x.cuda(), seed.cuda()
    qsim.decode(qsim.encode(y, name, seed=number, **how), name, dim=0)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        encoded = qsim.encode(y, name, seed=number, **how)
        decoded = qsim.decode(encoded, name, dim=0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(a is b is None or same_bits(b.cpu(), a) for a, b in zip(expected, encoded, strict=True))
    assert same_bits(decoded.cpu(), values)


def test_gradients_do_not_flow_into_codes() -> None:
    encoded = qsim.encode(torch.randn(64, requires_grad=True), "nvfp4")
    assert not any(part.requires_grad for part in encoded)
    assert not qsim.encode(torch.randn(64, requires_grad=True), "e4m3", scale=PerTensor()).scales.requires_grad


class TestInPlace:
    """quantize_ with scales."""

    @pytest.mark.parametrize("how", [{"format": "nvfp4", "dim": 0}, {"format": "e4m3", "scale": PerAxis(1)}], ids=["blocks", "scale"])
    def test_gives_what_quantize_gives(self, how: dict[str, Any]) -> None:
        x = hard(40, 64)[:, 3:]
        expected = qsim.quantize(x, rounding="stochastic", seed=2, **how)
        version = x._version
        assert qsim.quantize_(x, rounding="stochastic", seed=2, **how) is x
        assert same_bits(x, expected)
        assert x._version > version

    def test_out(self) -> None:
        x = hard(40, 64)
        expected, out = qsim.quantize(x, "mxfp4"), torch.empty_like(x)
        assert qsim.quantize(x, "mxfp4", out=out) is out
        assert same_bits(out, expected)
        assert same_bits(qsim.quantize(x, "mxfp4", out=x), expected)

    def test_refuses_what_quantize_would_not_take(self) -> None:
        with pytest.raises(ValueError, match="requires a gradient"):
            qsim.quantize_(torch.ones(4, requires_grad=True), "mxfp4")
        with pytest.raises(IndexError, match="no dimension 1"):
            qsim.quantize_(torch.ones(4), "mxfp4", dim=1)


class TestErrors:
    """Errors for bad input, before a random number is drawn."""

    @pytest.mark.parametrize(
        ("error", "match", "call"),
        [
            (IndexError, "no dimension 2 in a tensor of shape", lambda x: qsim.encode(x, "mxfp4", dim=2, rounding="stochastic")),
            (IndexError, "no dimension -3", lambda x: qsim.quantize(x, "mxfp4", dim=-3, rounding="stochastic")),
            (IndexError, "tiles are of matrices", lambda x: qsim.encode(x[0], "fp8_128x128", rounding="stochastic")),
            (TypeError, "dim must be an int", lambda x: qsim.quantize(x, "mxfp4", dim="last")),
            (ValueError, "'e4m3' has no blocks; got dim=0", lambda x: qsim.quantize(x, "e4m3", dim=0)),
            (ValueError, "'e4m3' has no blocks; got dim=-1", lambda x: qsim.quantize_(x, "e4m3", dim=-1)),
            (ValueError, "the scale sets its own dimension; got dim=0", lambda x: qsim.encode(x, "e4m3", dim=0, scale=PerAxis(0))),
            (ValueError, "has scales of its own", lambda x: qsim.encode(x, "mxfp4", scale=PerAxis(0))),
            (TypeError, "scale must be one of qsim.scaling's", lambda x: qsim.encode(x, "e4m3", scale=2.0)),
            (ValueError, "no code of NaN", lambda x: qsim.encode(x, Block("e2m1", 8, scale=E2M3), rounding="stochastic")),
            (ValueError, "overflow='nonfinite' makes NaN", lambda x: qsim.encode(x, "mxfp4", overflow="nonfinite")),
            (ValueError, "multiple of 2", lambda x: qsim.encode(x[:, 1:], "mxfp4", packed=True, rounding="stochastic")),
            (ValueError, "4-bit and 6-bit", lambda x: qsim.encode(x, "mxfp8", packed=True)),
            (ValueError, "float32 cannot hold every value", lambda x: qsim.encode(x, Int(32), scale=PerTensor())),
        ],
    )
    def test_encoding(self, error: type[Exception], match: str, call: Callable[[Tensor], Any]) -> None:
        torch.manual_seed(3)
        before = torch.get_rng_state()
        with pytest.raises(error, match=match):
            call(torch.ones(4, 16))
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize(
        ("error", "match", "changed"),
        [
            (TypeError, "codes must be a tensor, got list", {"codes": [1, 2]}),
            (TypeError, r"codes in torch.uint8, got torch.int16", {"codes": torch.zeros(4, 16, dtype=torch.int16)}),
            (TypeError, "codes must be dense", {"codes": torch.zeros(4, 16, dtype=torch.uint8).to_sparse()}),
            (ValueError, r"scales of shape \(4, 1\), got \(1, 4\)", {"scales": torch.zeros(1, 4, dtype=torch.uint8)}),
            (ValueError, r"codes of shape \(4, 17\)", {"codes": torch.zeros(4, 17, dtype=torch.uint8)}),
            (TypeError, "come in torch.uint8, got torch.float32", {"scales": torch.ones(4, 1)}),
            (TypeError, "come in torch.uint8, got torch.int8", {"scales": torch.ones(4, 1, dtype=torch.int8)}),
            (TypeError, "scales must be a tensor, got NoneType", {"scales": None}),
            (TypeError, "outer, a float32 scale of the whole tensor, got NoneType", {"outer": None}),
            (TypeError, "outer, a float32 scale of the whole tensor, got float", {"outer": 1.0}),
            (ValueError, "got torch.float64", {"outer": torch.ones((), dtype=torch.float64)}),
            (ValueError, r"and \(1,\)", {"outer": torch.ones(1)}),
            (ValueError, "scales is on meta, codes on cpu", {"scales": torch.zeros(4, 1, dtype=torch.uint8, device="meta")}),
            (ValueError, "outer is on meta, codes on cpu", {"outer": torch.zeros((), device="meta")}),
        ],
    )
    def test_decoding(self, error: type[Exception], match: str, changed: dict[str, Any]) -> None:
        encoded = qsim.encode(torch.ones(4, 16), "nvfp4")
        with pytest.raises(error, match=match):
            qsim.decode(replace(encoded, **changed), "nvfp4")

    def test_decoding_other_things(self) -> None:
        encoded = qsim.encode(torch.ones(4, 16), "mxfp4")
        with pytest.raises(TypeError, match=r"codes under scales are qsim.functional.ScaledCodes, got Tensor"):
            qsim.decode(encoded.codes, "mxfp4")
        with pytest.raises(TypeError, match="codes must be a tensor, got ScaledCodes"):
            qsim.decode(encoded, "e2m1")
        with pytest.raises(ValueError, match="outer must be None"):
            qsim.decode(replace(encoded, outer=torch.ones(())), "mxfp4")
        with pytest.raises(IndexError, match="no dimension 2"):
            qsim.decode(encoded, "mxfp4", dim=2)
        with pytest.raises(ValueError, match="float16 cannot hold"):
            qsim.decode(qsim.encode(torch.ones(4), BF16, scale=PerTensor()), BF16, scale=PerTensor(), dtype=torch.float16)

    @pytest.mark.parametrize(
        ("fmt", "match"),
        [
            (Int(1), "2\\*\\*-127 or more; the largest of Int\\(1\\) is 0"),
            (Float(4, 3, bias=160), "2\\*\\*-127 or more"),
            (Int(32), "scales are float32, which cannot hold"),
            (Float(8, 7, bias=0), "scales are float32, which cannot hold"),
        ],
        ids=repr,
    )
    def test_formats_that_hold_no_scale(self, fmt: Any, match: str) -> None:
        for make in (
            PerTensor,
            lambda f: PerBlock(8, format=f),
            lambda f: PerTile(2, 2, f),
            lambda f: PerAxis(0, f),
            lambda f: Block("e2m1", 8, f),
        ):
            with pytest.raises(ValueError, match=match):
                make(fmt)

    def test_elements_that_stand_under_no_scale(self) -> None:
        with pytest.raises(ValueError, match="largest value is zero"):
            qsim.quantize(torch.ones(4), Int(1), scale=PerTensor())

    @pytest.mark.parametrize("size", [0, -1, (0, 4), (4, 0)])
    def test_blocks_of_nothing(self, size: Any) -> None:
        with pytest.raises(ValueError, match="must be in 1…"):
            Block("e2m1", size)


@pytest.mark.parametrize("x", [torch.zeros(40), torch.tensor([1e-40, 0.0, 2e-39]), torch.zeros(3, 0), torch.full((20,), 2.0**-149)])
def test_scales_under_a_scale_do_not_vanish(x: Tensor) -> None:
    # The smallest outer scale times the smallest block scale would have an inverse beyond float32's range, and zeros would become NaN.
    encoded = check(x, "nvfp4")
    assert encoded.outer is not None
    assert encoded.outer.item() >= 2.0**-118
    assert not qsim.quantize(x, "nvfp4").isnan().any()
    assert (qsim.quantize(x, "nvfp4").abs() <= 2 * x.abs().max() if x.numel() else x).all()


def test_elements_that_float64_alone_holds() -> None:
    x = torch.randn(4, 8, dtype=torch.float64)
    encoded = check(x, Int(32), scale=PerBlock(4))
    assert encoded.codes.dtype == torch.int32
    assert check(x, FP16, scale=PerBlock(4, format=FP16)).scales.dtype == torch.int16
    assert check(x, "e2m1", scale=PerBlock(4, format=E8M0)).scales.dtype == torch.uint8


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("mxfp4", "mxfp8"),
        ("mxfp4", "mxfp6_e2m3"),
        ("mxfp8", "mxfp8_e5m2"),
        ("mxfp6_e3m2", "mxfp6_e2m3"),
        # Both have two scales per row, for other elements.
        (Block("e4m3", 40), Block("e4m3", 48)),
        (Block("e4m3", (2, 40)), Block("e4m3", (2, 48))),
    ],
)
def test_codes_are_decoded_as_they_were_encoded(name: Any, other: Any) -> None:
    """Scales and shapes fit; only the elements' format or the size of blocks is another, and so are the numbers."""
    scaled = qsim.encode(torch.randn(2, 64), name)
    stored = io.BytesIO()
    torch.save(scaled, stored)
    stored.seek(0)
    batched = torch.vmap(lambda codes: codes)(tree_map(lambda x: x[None], scaled))
    copies = [
        *(copy.deepcopy(scaled), copy.copy(scaled), pickle.loads(pickle.dumps(scaled)), torch.load(stored, weights_only=False)),
        *(tree_map(torch.clone, scaled), tree_map(lambda x: x[0], batched), replace(scaled, codes=scaled.codes.clone())),
    ]
    for codes in (scaled, *copies):
        assert torch.equal(qsim.decode(codes, name), qsim.decode(scaled, name))
        with pytest.raises(ValueError, match=r"^decode: the codes are those of e.m. under \S+ per \S+.*, and the format is e.m. under "):
            qsim.decode(codes, other)
    unnamed = ScaledCodes(scaled.codes, scaled.scales)
    assert qsim.decode(unnamed, name).shape == (2, 64)


def test_tiles_of_one_row_are_blocks() -> None:
    x = torch.randn(2, 64)
    assert torch.equal(qsim.decode(qsim.encode(x, Block("e2m1", (1, 32), scale="e8m0")), "mxfp4"), qsim.quantize(x, "mxfp4"))
    other_rule = Block("e2m1", 32, rule="ceil")
    assert torch.equal(qsim.decode(qsim.encode(x, other_rule), "mxfp4"), qsim.quantize(x, other_rule))


def test_exported_programs_keep_the_formats_of_codes() -> None:
    class Encode(torch.nn.Module):
        def forward(self, x: Tensor) -> ScaledCodes:
            return qsim.encode(x, "mxfp4")  # type: ignore[no-any-return]

    x = torch.randn(2, 64)
    program, stored = torch.export.export(Encode(), (x,)), io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    for own in (program, torch.export.load(stored)):
        codes = own.module()(x)
        assert torch.equal(qsim.decode(codes, "mxfp4"), qsim.quantize(x, "mxfp4"))
        with pytest.raises(ValueError, match="the codes are those of e2m1 under e8m0 per 32"):
            qsim.decode(codes, "mxfp8")
