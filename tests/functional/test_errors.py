"""Errors for bad input: they name the argument, the value received and what is allowed, before anything is drawn or written.

Errors of formats and roundings themselves are tested in `test_formats.py` and `test_rounding.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qsim
from qsim.random import Noise, random_bits
from support.refusing import refused

VALUES = [0.3, -1.7, 1e6, -0.0]
FLOATS = "float32, bfloat16, float16 or float64"
OPERATIONS = ["quantize", "quantize into out", "quantize_", "encode"]


@pytest.fixture
def x() -> Tensor:
    return torch.tensor(VALUES)


@pytest.fixture
def out(x: Tensor) -> Tensor:
    return torch.full_like(x, 7.0)


def run(operation: str, x: Any, out: Tensor, options: dict[str, Any]) -> Tensor:
    """Run one of `OPERATIONS`, with stochastic rounding unless the options say otherwise, so that it would draw."""
    options = {"format": "e4m3", "rounding": "stochastic", **options}
    if operation == "quantize into out":
        options["out"] = out
    call: Callable[..., Tensor] = getattr(qsim, operation.split()[0])
    return call(x, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "e4m33"}, ValueError, "unknown format 'e4m33': did you mean 'e4m3'?"),
        ({"format": "e4m24"}, ValueError, "unknown format 'e4m24'"),
        ({"format": ["e4m3"]}, TypeError, "a format must be a name, a torch dtype or a Format, got ['e4m3']"),
        ({"format": torch.complex64}, ValueError, "no format matches torch.complex64"),
        ({"rounding": "nearst"}, ValueError, "unknown rounding 'nearst': did you mean 'nearest'? Allowed are nearest, nearest_away, "),
        ({"rounding": 0}, TypeError, "rounding must be a name or a Rounding, got 0"),
        ({"overflow": "wrap"}, ValueError, "overflow must be 'saturate', 'saturate_symmetric', 'nonfinite' or 'format', got 'wrap'"),
        ({"seed": Noise(0, offset=-1)}, ValueError, "offset must not be negative, got -1"),
        ({"seed": Noise(offset=-1), "rounding": "nearest"}, ValueError, "offset must not be negative, got -1"),
        ({"seed": 1, "generator": torch.Generator()}, ValueError, "give seed= or generator=, not both"),
        ({"seed": 1, "generator": torch.Generator(), "rounding": "nearest"}, ValueError, "give seed= or generator=, not both"),
        ({"seed": Noise(1), "generator": torch.Generator()}, ValueError, "give seed= or generator=, not both"),
        ({"seed": 1.5, "rounding": "nearest"}, TypeError, "seed must be an int or a 0-d int64 tensor, got 1.5"),
        ({"seed": Noise(0, stream=None)}, TypeError, "stream must be an int, got None"),
        ({"seed": Noise("1")}, TypeError, "seed must be an int or a 0-d int64 tensor, got '1'"),
        ({"seed": "1"}, TypeError, "seed must be an int or a 0-d int64 tensor, got '1'"),
        ({"seed": True}, TypeError, "seed must be an int or a 0-d int64 tensor, got True"),
        ({"seed": 2**63}, ValueError, f"seed must fit 64 signed bits, got {2**63}"),
        ({"seed": -(2**63) - 1}, ValueError, f"seed must fit 64 signed bits, got {-(2**63) - 1}"),
        ({"seed": torch.tensor([1, 2])}, ValueError, "seed must be an int or a 0-d int64 tensor, got torch.int64 of shape (2,)"),
        (
            {"seed": torch.tensor(1, dtype=torch.int32)},
            ValueError,
            "seed must be an int or a 0-d int64 tensor, got torch.int32 of shape ()",
        ),
        ({"seed": torch.tensor(1.0)}, ValueError, "seed must be an int or a 0-d int64 tensor, got torch.float32 of shape ()"),
        ({"seed": torch.tensor(1, device="meta")}, ValueError, "seed is on meta, x on cpu: it must be on the same device or on the CPU"),
        ({"generator": 1}, TypeError, "generator must be a torch.Generator, got 1"),
    ],
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_options(operation: str, options: dict[str, Any], error: type[Exception], message: str, x: Tensor, out: Tensor) -> None:
    with refused(error, message, untouched=(x, out)):
        run(operation, x, out, options)


def sparse(layout: torch.layout) -> Tensor:
    """A sparse matrix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some layouts beta
        return torch.eye(4).to_sparse(layout=layout)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (VALUES, "x must be a tensor, got list"),
        (1.5, "x must be a tensor, got float"),
        (None, "x must be a tensor, got NoneType"),
        (np.ones(4), "x must be a tensor, got ndarray"),
        (torch.ones(4, dtype=torch.int32), f"x must be {FLOATS}, got torch.int32"),
        (torch.ones(4, dtype=torch.uint8), f"x must be {FLOATS}, got torch.uint8"),
        (torch.ones(4, dtype=torch.bool), f"x must be {FLOATS}, got torch.bool"),
        (torch.ones(4, dtype=torch.complex64), f"x must be {FLOATS}, got torch.complex64"),
        (torch.ones(4).to(torch.float8_e4m3fn), f"x must be {FLOATS}, got torch.float8_e4m3fn"),
        (sparse(torch.sparse_coo), "x must be dense, got layout torch.sparse_coo; call x.to_dense() first"),
        (sparse(torch.sparse_csr), "x must be dense, got layout torch.sparse_csr; call x.to_dense() first"),
    ],
)
@pytest.mark.parametrize("operation", [*OPERATIONS, "threshold_quantize"])
def test_inputs_of_another_kind(operation: str, bad: Any, message: str, out: Tensor) -> None:
    with refused(TypeError, f"{operation.split()[0]}: {message}", untouched=(out,)):
        if operation == "threshold_quantize":
            qsim.functional.threshold_quantize(bad, 1.0, 0.5)
        else:
            run(operation, bad, out, {})


@pytest.mark.parametrize(
    ("name", "dtype", "able"),
    [
        ("e8m7", torch.float16, "float64 can"),  # its top exponent is finite, so it exceeds float32
        ("e8m7", torch.bfloat16, "float64 can"),
        ("bf16", torch.float16, "bfloat16, float32, float64 can"),
        ("fp16", torch.bfloat16, "float16, float32, float64 can"),
        ("int16", torch.bfloat16, "float32, float64 can"),
        ("int32", torch.float32, "float64 can"),
    ],
)
def test_dtypes_that_cannot_hold_the_format(name: str, dtype: torch.dtype, able: str, x: Tensor) -> None:
    narrow, target = x.to(dtype), torch.full_like(x, 7.0, dtype=dtype)
    words = f"{dtype} cannot hold every value of {qsim.format(name)!r} (largest ", f" significant bits); {able}"
    calls: dict[str, list[Callable[[], Tensor]]] = {
        "dtype": [
            lambda: qsim.quantize(x, name, rounding="stochastic", dtype=dtype),
            lambda: qsim.decode(qsim.encode(x, name), name, dtype=dtype),
        ],
        "x": [lambda: qsim.quantize(narrow, name, rounding="stochastic"), lambda: qsim.quantize_(narrow, name, rounding="stochastic")],
        "out": [lambda: qsim.quantize(x, name, rounding="stochastic", out=target)],
    }
    for argument, wrong in calls.items():
        for call in wrong:
            with refused(ValueError, f"{argument}: {words[0]}", words[1], untouched=(x, narrow, target)):
                call()
    # Codes do not need a dtype that holds the values.
    assert torch.equal(qsim.encode(narrow, name), qsim.encode(narrow.double(), name))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_dtypes_that_are_none_of_the_four(dtype: torch.dtype, x: Tensor) -> None:
    for call in (
        lambda: qsim.quantize(x, "e4m3", rounding="stochastic", dtype=dtype),
        lambda: qsim.decode(torch.ones(4, dtype=torch.uint8), "e4m3", dtype=dtype),
    ):
        with refused(TypeError, f"dtype must be {FLOATS}, got {dtype}", untouched=(x,)):
            call()


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (torch.full((3,), 7.0), ValueError, ["out has shape (3,), x has (4,)", "must be the same"]),
        (torch.full((1, 4), 7.0), ValueError, ["out has shape (1, 4), x has (4,)", "must be the same"]),
        (torch.empty(4, device="meta"), ValueError, ["out is on meta, x on cpu", "must be on the same device"]),
        (torch.zeros(4, dtype=torch.int32), TypeError, [f"out must be {FLOATS}, got torch.int32"]),
        (torch.full((1,), 7.0).expand(4), ValueError, ["several elements of out share one place in memory"]),
        ([0.0] * 4, TypeError, ["out must be a tensor, got list"]),
    ],
)
def test_out(bad: Any, error: type[Exception], words: list[str], x: Tensor) -> None:
    written = (bad,) if isinstance(bad, Tensor) and bad.dtype == torch.float32 and bad.device.type == "cpu" else ()
    with refused(error, *words, untouched=(x, *written)):
        qsim.quantize(x, "e4m3", rounding="stochastic", out=bad)


def test_out_that_is_shifted_against_x() -> None:
    memory = torch.arange(6.0)
    with refused(ValueError, "out and x overlap in memory at different offsets: give another out", untouched=(memory,)):
        qsim.quantize(memory[:5], "e4m3", rounding="stochastic", out=memory[1:])
    with refused(ValueError, "overlap in memory", untouched=(memory,)):
        qsim.quantize(memory[3:], "e4m3", rounding="stochastic", out=memory[1:4])  # in one element
    with refused(ValueError, "overlap in memory", untouched=(memory,)):
        qsim.quantize(memory[:3], "e4m3", rounding="stochastic", out=memory[2:5])
    qsim.quantize(memory[3:], "e4m3", out=memory[:3])
    # The same elements, or others of one storage, are as good as tensors of their own.
    for x, out in ((memory, memory), (memory[:3], memory[3:])):
        expected = qsim.quantize(x, "e2m1")
        assert torch.equal(qsim.quantize(x, "e2m1", out=out), expected)


def test_clipped_gradients_under_scales(x: Tensor) -> None:
    words = "clip_gradient=True is for formats without scales: under scales there is no range to leave"
    for name, scale in (("mxfp4", None), ("e4m3", "tensor")):
        with refused(ValueError, words, untouched=(x,)):
            qsim.quantize(x, name, rounding="stochastic", scale=scale, clip_gradient=True)
        with refused(ValueError, f"Quantizer: {words}"):
            qsim.Quantizer(name, "stochastic", scale=scale, clip_gradient=True)


def test_out_and_dtype_that_contradict_each_other(x: Tensor, out: Tensor) -> None:
    with refused(ValueError, "dtype=torch.float64 contradicts out=, which is torch.float32", untouched=(x, out)):
        qsim.quantize(x, "e4m3", rounding="stochastic", dtype=torch.float64, out=out)


def test_in_place_on_an_expanded_tensor(x: Tensor) -> None:
    with refused(
        ValueError, "quantize_: several elements of x share one place in memory (an expanded tensor); use quantize", untouched=(x,)
    ):
        qsim.quantize_(x.expand(3, 4), "e4m3", rounding="stochastic")


@pytest.mark.parametrize(("name", "groups"), [("e2m1", 2), ("e3m2", 4)])
@pytest.mark.parametrize("shape", [(), (1,), (4, 5)])
def test_codes_that_do_not_fill_bytes(name: str, groups: int, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    words = f"packed=True puts {groups} codes of ", f"the last dimension must be a multiple of {groups}, got shape {shape}"
    with refused(ValueError, *words, untouched=(x,)):
        qsim.encode(x, name, rounding="stochastic", packed=True)


@pytest.mark.parametrize("name", ["e4m3", "fp16", "fp32", "e4m0"])
def test_formats_that_are_not_packed(name: str, x: Tensor) -> None:
    fmt = qsim.format(name)
    message = f"packed=True is for 4-bit and 6-bit formats; {fmt!r} has {fmt.bits} bits"
    with refused(ValueError, message, untouched=(x,)):
        qsim.encode(x, name, rounding="stochastic", packed=True)
    with refused(ValueError, message):
        qsim.decode(torch.ones(4, dtype=torch.uint8), name, packed=True)


@pytest.mark.parametrize(
    ("codes", "name", "packed", "error", "message"),
    [
        (torch.ones(3, dtype=torch.int64), "e4m3", False, TypeError, "has codes in torch.uint8, got torch.int64"),
        (torch.ones(3), "e2m1", True, TypeError, "has codes in torch.uint8, got torch.float32"),
        (torch.ones(3, dtype=torch.uint8), "fp16", False, TypeError, "has codes in torch.int16, got torch.uint8"),
        (torch.ones(3, dtype=torch.int16), "tf32", False, TypeError, "has codes in torch.int32, got torch.int16"),
        (3, "e4m3", False, TypeError, "codes must be a tensor, got int"),
        ([3], "e4m3", True, TypeError, "codes must be a tensor, got list"),
        (torch.tensor([3, 200], dtype=torch.uint8), "e2m1", False, ValueError, "must be in 0…15, as it has 4 bits, got 200"),
        (torch.tensor(16, dtype=torch.uint8), "int4", False, ValueError, "must be in 0…15, as it has 4 bits, got 16"),
        (torch.tensor([-1, 3], dtype=torch.int16), "e5m6", False, ValueError, "must be in 0…4095, as it has 12 bits, got -1"),
        (torch.tensor([1 << 20]), "int20", False, TypeError, "has codes in torch.int32, got torch.int64"),
        (torch.tensor([1 << 20], dtype=torch.int32), "int20", False, ValueError, "must be in 0…1048575, as it has 20 bits, got 1048576"),
        (
            torch.ones(4, dtype=torch.uint8),
            "e3m2",
            True,
            ValueError,
            "packed codes of 6 bits come in groups of 3 byte(s) along the last dimension, got shape (4,)",
        ),
        (torch.tensor(1, dtype=torch.uint8), "e3m2", True, ValueError, "3 byte(s) along the last dimension, got shape ()"),
        (torch.tensor(1, dtype=torch.uint8), "e2m1", True, ValueError, "1 byte(s) along the last dimension, got shape ()"),
    ],
)
def test_codes_that_cannot_be_read(codes: Any, name: str, packed: bool, error: type[Exception], message: str) -> None:
    with refused(error, message):
        qsim.decode(codes, name, packed=packed)


def test_scaled_codes_beyond_their_format() -> None:
    scaling = qsim.scaling.PerBlock(2, format=qsim.Float(3, 2, specials="fn"), rule="ceil")
    given = qsim.encode(torch.ones(4), "e2m1", scale=scaling)
    with refused(ValueError, "decode: codes of Float(2, 1) must be in 0…15, as it has 4 bits, got 16"):
        qsim.decode(replace(given, codes=torch.full_like(given.codes, 16)), "e2m1", scale=scaling)
    with refused(ValueError, "decode: scales of Float(3, 2, specials='fn') must be in 0…63, as it has 6 bits, got 255"):
        qsim.decode(replace(given, scales=torch.full_like(given.scales, 255)), "e2m1", scale=scaling)


def test_codes_are_not_read_where_there_are_none() -> None:
    codes = torch.full((2, 3), 2, dtype=torch.uint8)
    assert qsim.decode(codes.to("meta"), "e2m1").shape == codes.shape
    assert torch.vmap(lambda x: qsim.decode(x, "e2m1"))(codes).tolist() == [[1.0] * 3] * 2
    assert qsim.decode(codes[:0], "e2m1").shape == (0, 3)


class OwnFormat(qsim.formats.Format):
    """A format that a user wrote, with values but without the grid and the codes that kernels need."""

    bits = 4

    def values(self) -> tuple[float, ...]:
        return (0.0, 1.0)


class OwnRounding(qsim.rounding.Rounding):
    """A rounding that a user wrote, without any of the modes."""

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    "use",
    [
        qsim.format,
        qsim.Quantizer,
        lambda fmt: qsim.quantize(torch.ones(1), fmt),
        lambda fmt: qsim.encode(torch.ones(1), fmt),
        lambda fmt: qsim.decode(torch.ones(1, dtype=torch.uint8), fmt),
        lambda fmt: qsim.FivePoint(act=fmt, act_bwd=None),
        lambda fmt: qsim.scaling.Block(fmt, 32),
        lambda fmt: qsim.accumulators.Rounded(fmt),
    ],
)
def test_formats_of_other_classes(use: Callable[[Any], Any]) -> None:
    with pytest.raises(
        TypeError, match="a format must be a name, a torch dtype or a Float, Fixed, Int, PowerOfTwo or Table, got OwnFormat, a subclass"
    ):
        use(OwnFormat())


@pytest.mark.parametrize(
    "use",
    [
        qsim.rounding.resolve,
        lambda rounding: qsim.Quantizer("e4m3", rounding),
        lambda rounding: qsim.quantize(torch.ones(1), "e4m3", rounding=rounding),
        lambda rounding: qsim.encode(torch.ones(1), "e4m3", rounding=rounding),
    ],
)
def test_roundings_of_other_classes(use: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"rounding must be a name, a mode of qsim\.rounding or a Stochastic, got OwnRounding, a subclass"):
        use(OwnRounding())


@pytest.mark.parametrize(
    ("step", "threshold", "error", "message"),
    [
        (-1.0, 0.5, ValueError, "step must be finite and not negative, got -1.0"),
        (float("nan"), 0.5, ValueError, "step must be finite and not negative, got nan"),
        (float("inf"), 0.5, ValueError, "step must be finite and not negative, got inf"),
        (1.0, float("nan"), ValueError, "threshold must be in 0…1, got nan"),
        (1.0, 1.5, ValueError, "threshold must be in 0…1, got 1.5"),
        (1.0, -0.5, ValueError, "threshold must be in 0…1, got -0.5"),
        ("1", 0.5, TypeError, "step must be a number or a tensor, got '1'"),
        (True, 0.5, TypeError, "step must be a number or a tensor, got True"),
        (1.0, None, TypeError, "threshold must be a number or a tensor, got None"),
        (torch.ones(3), 0.5, ValueError, "step of shape (3,) does not broadcast to x's shape (4,)"),
        (1.0, torch.ones(2, 4), ValueError, "threshold of shape (2, 4) does not broadcast to x's shape (4,)"),
    ],
)
def test_threshold_quantize(step: Any, threshold: Any, error: type[Exception], message: str, x: Tensor) -> None:
    with refused(error, f"threshold_quantize: {message}", untouched=(x,)):
        qsim.functional.threshold_quantize(x, step, threshold)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "e4m33"}, ValueError, "unknown format 'e4m33': did you mean 'e4m3'?"),
        ({"rounding": "nearst"}, ValueError, "unknown rounding 'nearst': did you mean 'nearest'?"),
        ({"overflow": "wrap"}, ValueError, "overflow must be 'saturate', 'saturate_symmetric', 'nonfinite' or 'format', got 'wrap'"),
        ({"scale": 2.0}, TypeError, "scale must be one of qsim.scaling's, got 2.0"),
    ],
)
def test_quantizers_are_refused_when_they_are_made(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with refused(error, message):
        qsim.Quantizer(**{"format": "e4m3", **options})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"count": 1.5}, TypeError, "count must be an int, got 1.5"),
        ({"count": -1}, ValueError, "count must not be negative, got -1"),
        ({"bits": True}, TypeError, "bits must be an int, got True"),
        ({"bits": 0}, ValueError, "bits must be in 1…32, got 0"),
        ({"bits": 33}, ValueError, "bits must be in 1…32, got 33"),
        ({"offset": -1}, ValueError, "offset must not be negative, got -1"),
        ({"stream": "weight"}, TypeError, "stream must be an int, got 'weight'"),
        ({"stream": 2**63}, ValueError, f"stream must fit 64 signed bits, got {2**63}"),
        ({"seed": "1"}, TypeError, "seed must be an int or a 0-d int64 tensor, got '1'"),
        ({"seed": 2**63}, ValueError, f"seed must fit 64 signed bits, got {2**63}"),
        ({"seed": torch.ones(2)}, ValueError, "seed must be an int or a 0-d int64 tensor, got torch.float32 of shape (2,)"),
    ],
)
def test_random_bits(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with refused(error, message):
        random_bits(**{"count": 4, "bits": 8, "seed": 0, **options})
