"""Block formats compared with those of gfloat and with torch's casts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import gfloat
import gfloat.formats as peers
import numpy as np
import pytest
import torch
from gfloat.block import BlockFormatInfo
from torch import Tensor

import qsim
from qsim.formats import E4M3, E5M2, E8M0, FP32, Format
from qsim.scaling import NAMED, PerBlock
from support.scaled_cases import hard

GFLOAT: dict[str, BlockFormatInfo] = {
    "mxfp8_e4m3": peers.format_info_mxfp8_e4m3,
    "mxfp8_e5m2": peers.format_info_mxfp8_e5m2,
    "mxfp6_e3m2": peers.format_info_mxfp6_e3m2,
    "mxfp6_e2m3": peers.format_info_mxfp6_e2m3,
    "mxfp4": peers.format_info_mxfp4_e2m1,
    "mxint8": peers.format_info_mxint8,
}


def kinds_of_blocks(generator: torch.Generator) -> dict[str, Tensor]:
    """Blocks of 32, by their special property."""
    normal = torch.randn(64, 32, generator=generator)
    outlier = normal * 1e-3
    outlier[:, 7] = 3e4
    return {
        "random": normal * torch.linspace(-100, 100, 64)[:, None].exp2(),
        "all equal": torch.linspace(-60, 60, 64)[:, None].exp2() * 1.7 * torch.ones(32),
        "one outlier": outlier,
        "subnormal": normal.sign() * torch.arange(1, 65)[:, None] * 2.0**-149 * torch.arange(32),
        "zero": torch.cat([torch.zeros(1, 32), -torch.zeros(1, 32)]),
        "ties": torch.arange(64 * 32).view(64, 32) / 32 - 30,
    }


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", GFLOAT)
def test_gfloat(name: str, session_seed: int) -> None:
    peer = GFLOAT[name]
    assert isinstance(NAMED[name].size, int)
    assert (peer.k, peer.etype.k, peer.stype.k) == (NAMED[name].size, NAMED[name].element.bits, 8)
    for kind, x in kinds_of_blocks(torch.Generator().manual_seed(session_seed)).items():
        encoded = qsim.encode(x, name)
        got = qsim.decode(encoded, name)
        for row, codes, scale, values in zip(
            x.double().numpy(), encoded.codes.tolist(), encoded.scales.flatten().tolist(), got, strict=True
        ):
            theirs = gfloat.quantize_block(peer, row, exact_scale)
            where = f"{kind}: {row[:4]}… became {values[:4]}…, of gfloat's {theirs[:4]}…"
            assert np.array_equal(values.double().numpy(), theirs.astype(np.float32).astype(np.float64)), where
            # Their decoder reads our bytes: the scale, then the elements.
            read = np.fromiter(gfloat.decode_block(peer, [scale, *codes]), float)
            assert np.array_equal(read.astype(np.float32), values.numpy()), where


def exact_scale(emax: float, values: Any) -> float:
    """gfloat's own scale, without its logarithm, which is wrong next to powers of two; for zeros the smallest one, as in gfloat."""
    largest = float(np.abs(values).max())
    power = math.frexp(largest)[1] - 1 - int(emax) if largest else -127
    return float(2.0 ** min(max(power, -127), 127))


@pytest.mark.parametrize("name", GFLOAT)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_gfloat_reads_nan_where_a_block_is_not_finite(name: str, bad: float) -> None:
    x = torch.ones(2, 32)
    x[0, 5] = bad
    encoded = qsim.encode(x, name)
    for row, expected in enumerate((True, False)):
        read = np.fromiter(gfloat.decode_block(GFLOAT[name], [int(encoded.scales[row]), *encoded.codes[row].tolist()]), float)
        assert np.isnan(read).all() == np.isnan(read).any() == expected


@pytest.mark.parametrize(("element", "theirs"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
@pytest.mark.parametrize("fmt", [E8M0, FP32], ids=["E8M0", "FP32"])
def test_torchs_casts(element: Format, theirs: torch.dtype, fmt: Format) -> None:
    # The rounded-up scale saturates nothing, so torch's cast, which does not saturate, is the same.
    x = hard(64, 96)
    x = x[x.isfinite().all(1)]
    scaling = PerBlock(32, format=fmt, rule="ceil")
    encoded = qsim.encode(x, element, scale=scaling)
    scales = encoded.scales if fmt == FP32 else encoded.scales.view(torch.float8_e8m0fnu).float()
    divided = x.view(-1, 3, 32) * scales.reciprocal()[..., None]
    assert torch.equal(divided.clamp(-element.max, element.max).to(theirs).view(torch.uint8).view(x.shape), encoded.codes)


def test_torchs_e8m0_cast_reads_and_writes_scales() -> None:
    x = hard(64, 96)
    encoded = qsim.encode(x, "mxfp8")
    values = encoded.scales.view(torch.float8_e8m0fnu).float()
    assert torch.equal(values.to(torch.float8_e8m0fnu).view(torch.uint8), encoded.scales)
    assert values.isnan().any()


def test_torchs_float4_holds_packed_codes() -> None:
    # torch has no CPU casts for it; each byte has two codes, the first in the low bits, and shapes count bytes.
    encoded = qsim.encode(torch.tensor([[0.5, -6.0, 3.0, 0.0]]), "mxfp4", packed=True)
    pairs = encoded.codes.view(torch.float4_e2m1fn_x2)
    assert pairs.shape == (1, 2)
    assert torch.equal(pairs.view(torch.uint8) & 15, torch.tensor([[1, 5]], dtype=torch.uint8))
    assert torch.equal(
        qsim.decode(replace(encoded, codes=pairs.view(torch.uint8)), "mxfp4", packed=True), torch.tensor([[0.5, -6.0, 3.0, 0.0]])
    )
