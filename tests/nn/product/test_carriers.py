"""Tests that every product is computed in a dtype that holds its operands exactly, and in no wider one."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import qsim
from qsim import FivePoint, Float, Int, Quantizer
from qsim.formats import BF16, E2M1, E4M3, E5M2, FP16, NAMED, Format
from qsim.nn.product import float32
from qsim.nn.product.arithmetic import Arithmetic, multiply
from qsim.nn.product.bilinear import LinearProduct
from qsim.nn.product.carriers import ProductCarrier, product_carrier
from qsim_kernels.ops.direct import DISPATCHED
from support.written_out import (
    CASES,
    DTYPES,
    ProductCase,
    check,
    convolution,
    matmul,
    noisy,
    operands,
)

FEW_BITS = {name: fmt for name, fmt in NAMED.items() if fmt.precision <= 8}


def test_the_formats_of_few_bits_are_the_ones_meant() -> None:
    assert {"e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "e8m0", "bf16", "int8", "int4"} <= set(FEW_BITS)
    assert not {"fp16", "tf32", "fp32"} & set(FEW_BITS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fmt", FEW_BITS.values(), ids=FEW_BITS)
@pytest.mark.parametrize("case", ["linear", "matmul", "conv"])
def test_products_of_few_bits_are_exact(device: torch.device, fmt: Format, case: str) -> None:
    chosen = {
        "linear": ProductCase(LinearProduct(), F.linear, (64, 96), (80, 96)),
        "matmul": matmul((2, 48, 96), (2, 96, 64)),
        "conv": convolution(2)._replace(bias=None),
    }[case]
    given = operands(chosen, torch.float32, device, scale=min(1.0, fmt.max / 4) if fmt.max < 100 else 8.0)
    check(chosen, FivePoint(fmt, fmt, act_bwd="same", weight_bwd="same", grad=Quantizer(fmt, overflow="saturate")), given)


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
    assert product_carrier(first, second, CUDA).dtype == product_carrier(second, first, CUDA).dtype == on_cuda
    assert product_carrier(first, second, CPU).dtype == product_carrier(second, first, CPU).dtype == on_cpu


def test_results_of_convolutions_have_their_operands_dtype() -> None:
    # So a 16-bit carrier only works if it is the dtype of the result.
    eight, eleven = (E4M3, torch.float32), (FP16, torch.float32)
    carrier = convolution(2).product.carrier
    assert [carrier(0, eight, eight, dtype, CUDA).dtype for dtype in DTYPES] == [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float32,
    ]
    assert [carrier(0, eight, eleven, dtype, CUDA).dtype for dtype in DTYPES] == [
        torch.float32,
        torch.float32,
        torch.float16,
        torch.float32,
    ]


@pytest.mark.parametrize(
    ("point", "dtype", "on_cuda", "on_cpu"),
    [
        (E4M3, torch.float32, False, False),
        (None, torch.bfloat16, False, False),
        (None, torch.float16, False, True),
        (FP16, torch.float32, False, True),
        (TF32, torch.float32, False, True),
        (Float(5, 11), torch.float32, True, True),
        (Int(16), torch.float32, True, True),
        (None, torch.float32, True, True),
    ],
)
def test_float32_is_not_shortened_where_that_would_change_it(point: Any, dtype: torch.dtype, on_cuda: bool, on_cpu: bool) -> None:
    # The second operand rules out 16-bit carriers.
    a, b = (point, dtype), (BF16, torch.float32)
    assert (
        product_carrier(a, b, CUDA, torch.float32) == product_carrier(b, a, CUDA, torch.float32) == ProductCarrier(torch.float32, on_cuda)
    )
    assert product_carrier(a, b, CPU) == product_carrier(b, a, CPU) == ProductCarrier(torch.float32, on_cpu)


@pytest.mark.parametrize("setting", ["old", "new", "none"])
@pytest.mark.parametrize("case", ["linear", "matmul", "conv2d", "transposed 1d"])
def test_settings_that_shorten_float32_neither_reach_the_products_nor_change(device: torch.device, setting: str, case: str) -> None:
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = torch.get_float32_matmul_precision(), matmul.fp32_precision, conv.fp32_precision
    points = FivePoint("e4m3", None, act_bwd=noisy(Float(5, 15)), weight_bwd="e4m3", grad=noisy(Float(5, 12)))
    try:
        if setting == "old":
            torch.set_float32_matmul_precision("medium")
        elif setting == "new":
            matmul.fp32_precision = conv.fp32_precision = "tf32"
        after = matmul.fp32_precision, conv.fp32_precision
        check(CASES[case], points, operands(CASES[case], torch.float32, device))
        assert (matmul.fp32_precision, conv.fp32_precision) == after
        if setting == "old":
            assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before[0])
        matmul.fp32_precision, conv.fp32_precision = before[1:]


def test_threads_take_turns_with_the_settings() -> None:
    mkldnn: Any = torch.backends.mkldnn  # whose attributes are only known at run time
    setting, before = mkldnn.matmul, mkldnn.matmul.fp32_precision
    x = torch.randn(200, 200)

    def multiply() -> None:
        for _ in range(100):
            float32.matmul(x, x)

    threads = [Thread(target=multiply) for _ in range(4)]
    try:
        setting.fp32_precision = "bf16"
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert setting.fp32_precision == "bf16"
    finally:
        setting.fp32_precision = before


@pytest.mark.parametrize("transposed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_operators_of_exact_products_pass_opcheck(device: torch.device, transposed: bool) -> None:
    a, w = torch.randn(2, 4, 8, device=device), torch.randn(4, 4, 3, device=device)
    numbers = ([1], [1], [1], transposed, [0], 1)
    torch.library.opcheck(torch.ops.qsim.float32_matmul.default, (a, a.mT))
    torch.library.opcheck(torch.ops.qsim.float32_convolution.default, (a, w, torch.ones(4, device=device), *numbers))
    for second in (False, True):
        other, shape = (a, w.shape) if second else (w, a.shape)
        for exact in (True, False):
            torch.library.opcheck(torch.ops.qsim.convolution_gradient.default, (a, other, list(shape), second, exact, *numbers))


def test_multiply_sums_in_float32(device: torch.device) -> None:
    # 1 and 2**-9 many times: in bfloat16 the sum would never change.
    narrow = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.full((1, 257), 2.0**-9, device=device, dtype=narrow)
    a[0, 0] = 1.0
    b = torch.ones(257, 1, device=device, dtype=narrow)
    for left, right in ((a, b), (a[None], b[None])):
        assert multiply(left, right, Arithmetic(torch.float32, DISPATCHED)).item() == 1.5
        assert multiply(left, right, Arithmetic(torch.float64, DISPATCHED)).dtype == torch.float64
