"""The oracle itself: fractions compared with arrays, and both with gfloat and ml_dtypes where these have the format."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import gfloat
import numpy as np
import pytest
import torch

from qsim.formats import E2M1, E4M3, E8M0, Fixed, Float, Format
from support import inputs, oracle, oracle_arrays
from support.catalogue import GFLOAT, GFLOAT_ROUNDINGS, ML_DTYPES, NAMED, VARIETY
from support.covering import dealt


def same(a: float, b: float) -> bool:
    """Equal as bit patterns, with all NaN equal."""
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


def test_worked_by_hand() -> None:
    # The contract's own examples, and a few that a person can check.
    cases = [
        (448.0, E4M3, "nearest", "nonfinite", 448.0),
        (464.0, E4M3, "nearest", "nonfinite", 448.0),  # the boundary: a tie between 448 (even code) and 480
        (464.01, E4M3, "nearest", "nonfinite", math.nan),
        (464.01, E4M3, "toward_zero", "nonfinite", 448.0),
        (2.5, E2M1, "nearest", "saturate", 2.0),
        (3.5, E2M1, "nearest", "saturate", 4.0),
        (-2.5, E2M1, "nearest_up", "saturate", -2.0),
        (-2.5, E2M1, "nearest_away", "saturate", -3.0),
        (2.1, E2M1, "odd", "saturate", 3.0),
        (-0.1, E2M1, "nearest", "saturate", -0.0),
        (3.0, E8M0, "nearest", "saturate", 2.0),
        (0.7, Float(3, 2, subnormals=False), "nearest", "saturate", 0.75),
        (0.1, Float(3, 2, subnormals=False), "nearest", "saturate", 0.0),
        (0.125, Float(3, 2, subnormals=False), "nearest", "saturate", 0.0),
        (0.24, Float(3, 2, subnormals="flush"), "up", "saturate", 0.0),
        (-0.24, Float(3, 2, subnormals="flush"), "odd", "saturate", -0.0),
        (0.25, Float(3, 2, subnormals="flush"), "down", "saturate", 0.25),
        (-129.0, Fixed(8, 0), "nearest", "saturate", -128.0),
        (-0.4, Fixed(8, 0), "nearest", "saturate", 0.0),
    ]
    for x, fmt, rounding, overflow, expected in cases:
        assert same(oracle.round_exact(x, fmt, rounding, overflow), expected), (x, fmt, rounding)


def test_stochastic_worked_by_hand() -> None:
    # 1.1 lies a fifth of the way from 1 to 1.5; three bits make that floor(1.6) = 1 of 8 integers, with correction floor(2.1) = 2.
    up = [oracle.round_exact(1.1, E2M1, "stochastic", "saturate", R, 3) for R in range(8)]
    assert up == [1.0] * 7 + [1.5]
    corrected = [oracle.round_exact(1.1, E2M1, "stochastic", "saturate", R, 3, correction=True) for R in range(8)]
    assert corrected == [1.0] * 6 + [1.5] * 2


def points(fmt: Format, count: int) -> torch.Tensor:
    """A few hundred numbers for the slow route."""
    everything = torch.cat(
        [inputs.edges(fmt, torch.float64, 24), inputs.edges(fmt, torch.float32, 24).double(), inputs.double_rounding(fmt, 24)]
    )
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(1))
    return everything[order[:count]]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("fmt", [*NAMED, *VARIETY], ids=repr)
def test_arrays_agree_with_fractions(fmt: Format) -> None:
    x = points(fmt, 120)
    bracket = oracle_arrays.Bracket(fmt, oracle_arrays.numbers(x))
    for number, rounding in enumerate(oracle.DETERMINISTIC):
        for turn, overflow in enumerate(oracle.OVERFLOWS):
            fast = bracket.round(rounding, overflow)
            # Each number under every rounding, with one of the overflows.
            for i, value in dealt([*enumerate(x.tolist())], number + turn, 2):
                slow = oracle.round_exact(value, fmt, rounding, overflow)
                assert same(slow, float(fast[i])), (value, fmt, rounding, overflow)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("fmt", [*NAMED, *VARIETY], ids=repr)
@pytest.mark.parametrize("bits", [1, 5, 16, 32])
@pytest.mark.parametrize("correction", [False, True])
def test_stochastic_arrays_agree_with_fractions(fmt: Format, bits: int, correction: bool) -> None:
    x = points(fmt, 60)
    random = np.random.default_rng(2).integers(0, 2**bits, len(x))
    bracket = oracle_arrays.Bracket(fmt, oracle_arrays.numbers(x))
    for overflow in dealt(oracle.OVERFLOWS, [*NAMED, *VARIETY].index(fmt) + bits.bit_length() + correction, 2):
        fast = bracket.round("stochastic", overflow, random, bits, correction)
        for i, value in enumerate(x.tolist()):
            slow = oracle.round_exact(value, fmt, "stochastic", overflow, int(random[i]), bits, correction)
            assert same(slow, float(fast[i])), (value, fmt, random[i], overflow)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("fmt", GFLOAT, ids=repr)
def test_fractions_agree_with_gfloat(fmt: Format) -> None:
    x = points(fmt, 200).numpy()
    # gfloat raises errors for NaN in formats without it, and drops the sign of an unsigned format's input. Only qsim defines those.
    x = x[~np.isnan(x) & ((x > 0) | GFLOAT[fmt].is_signed)]
    for rounding, name in GFLOAT_ROUNDINGS.items():
        for overflow in oracle.OVERFLOWS if oracle.has_nan(fmt) else ("saturate",):
            # Not gfloat.round_float: its ties away from zero add 1/2 in float64, which changes numbers just below a tie.
            with np.errstate(over="ignore"):
                theirs = gfloat.round_ndarray(GFLOAT[fmt], x, name, sat=overflow != "nonfinite")
            for value, expected in zip(x.tolist(), theirs.tolist(), strict=True):
                assert same(oracle.round_exact(value, fmt, rounding, overflow), expected), (value, fmt, rounding, overflow)


@pytest.mark.parametrize("fmt", ML_DTYPES, ids=repr)
def test_arrays_agree_with_ml_dtypes(fmt: Format) -> None:
    x = torch.cat([inputs.every_pattern(torch.bfloat16).float(), inputs.edges(fmt, torch.float32)])
    with np.errstate(all="ignore"):
        theirs = x.numpy().astype(ML_DTYPES[fmt]).astype(np.float64)
    # ml_dtypes saturates formats without infinity and NaN; formats with them overflow.
    overflow = "nonfinite" if oracle.has_nan(fmt) else "saturate"
    ours = oracle_arrays.Bracket(fmt, oracle_arrays.numbers(x)).round("nearest", overflow)
    finite = ~np.isnan(oracle_arrays.numbers(x))
    wrong = ~((ours == theirs) & (np.signbit(ours) == np.signbit(theirs)) | (np.isnan(ours) & np.isnan(theirs))) & finite
    assert not wrong.any(), (x[torch.from_numpy(wrong)][:5], ours[wrong][:5], theirs[wrong][:5])


@pytest.mark.parametrize("fmt", [fmt for fmt in ML_DTYPES if fmt.bits <= 8], ids=repr)
def test_codes_agree_with_ml_dtypes(fmt: Format) -> None:
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    theirs = codes.view(ML_DTYPES[fmt]).astype(np.float64)
    for code in codes.tolist():
        ours = oracle.decode_exact(code, fmt)
        assert ours is not None
        assert same(ours, float(theirs[code])), code


@pytest.mark.parametrize("fmt", [fmt for fmt in GFLOAT if fmt.bits <= 8], ids=repr)
def test_codes_agree_with_gfloat(fmt: Format) -> None:
    for code in range(2**fmt.bits):
        ours = oracle.decode_exact(code, fmt)
        assert ours is not None
        assert same(ours, gfloat.decode_float(GFLOAT[fmt], code).fval), code


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fmt", [*NAMED, *VARIETY], ids=repr)
def test_codes_agree_with_fractions(fmt: Format) -> None:
    x = points(fmt, 200)
    values = oracle_arrays.Bracket(fmt, oracle_arrays.numbers(x)).round("nearest", "nonfinite")
    for value, code in zip(values.tolist(), oracle_arrays.encode(values, fmt).tolist(), strict=True):
        exact = oracle.encode_exact(value, fmt)
        assert (-1 if exact is None else exact) == code, (value, fmt)
        if exact is not None:
            back = oracle.decode_exact(exact, fmt)
            assert back is not None
            assert same(back, value), (value, fmt)


def test_double_rounding_inputs_do_what_they_say() -> None:
    # Next to a midpoint in float64, on it in float32: so the detour decides by the tie rule, and half of the decisions are wrong.
    x = inputs.double_rounding(E4M3)
    exact = oracle_arrays.Bracket(E4M3, oracle_arrays.numbers(x)).round("nearest", "saturate")
    detour = oracle_arrays.Bracket(E4M3, oracle_arrays.numbers(x.float())).round("nearest", "saturate")
    assert (exact != detour).sum() > len(x) / 4


def test_nan_classes() -> None:
    found = {pattern & 0xFFFFFFFF for pattern in inputs.nans(torch.float32).view(torch.int32).tolist()}
    assert {0x7FFFFFFF, 0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0xFF800001, 0xFFC00000} <= found
    for dtype in inputs.DTYPES:
        assert inputs.nans(dtype).isnan().all()


def test_memory_is_poisoned() -> None:
    # Otherwise the other tests could pass on memory that happens to contain the right numbers.
    for dtype in inputs.DTYPES:
        assert torch.empty(1000, dtype=dtype).isnan().all()
        assert torch.empty_like(torch.ones(10, 10, dtype=dtype)).isnan().all()
    assert (torch.empty(1000, dtype=torch.uint8) == 255).all()


#: What says what results must be. Formats, points, scales and accumulators are arguments; only what they were made of is read from them.
ORACLES = (
    "oracle",
    "oracle_arrays",
    "philox_oracle",
    "random123",
    "table_oracle",
    "scales",
    "block_oracle",
    "sum_oracle",
    "product_oracle",
    "written_out_updates",
    "exact_gradients",
    "layout_decoders",
)


def tree_of(name: str) -> ast.Module:
    return ast.parse((Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ORACLES)
def test_oracles_import_nothing_but_each_other(name: str) -> None:
    imported = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {f"support.{alias.name}" for alias in node.names} if node.module == "support" else {node.module or ""}
    own = {module for module in imported if module.partition(".")[0] in ("qsim", "qsim_kernels", "support", "importlib")}
    assert own <= {f"support.{name}" for name in ORACLES}


#: What the library computes about formats, and the names by which oracles have descriptions of it.
COMPUTED = {"max", "min", "smallest", "smallest_normal", "epsilon", "values", "bits", "has_inf", "has_nan", "has_subnormals", "grid"}
DESCRIPTIONS = ("fmt", "element", "out", "how", "point", "points", "scaling")


@pytest.mark.parametrize("name", ORACLES)
def test_oracles_read_nothing_that_the_library_computes(name: str) -> None:
    read = {ast.unparse(node) for node in ast.walk(tree_of(name)) if isinstance(node, ast.Attribute) and node.attr in COMPUTED}
    # The bits of fixed-point formats and of stochastic roundings are given.
    given = {"fmt.bits", "how.bits", "how.rounding.bits"}
    assert not {text for text in read if text.partition(".")[0] in DESCRIPTIONS} - given


def test_no_oracle_is_left_out() -> None:
    assert {path.stem for path in Path(__file__).parent.glob("*oracle*.py")} - {"test_oracle"} <= {*ORACLES}
