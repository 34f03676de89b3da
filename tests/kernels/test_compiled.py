"""Tests that compiled CPU loops match the plain torch operators bit for bit, for all tensors, threads and processes."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import qsim
from qsim import rounding
from qsim.formats import E4M3, Format, holders
from qsim_kernels import torch as reference
from qsim_kernels.numbers.carrier import fits_single, grid_bits
from qsim_kernels.numbers.encoding import Encoding
from qsim_kernels.numbers.grid import Coding, Grid, GridRounding, Rule, read
from qsim_kernels.torch import ElementNoise, chunks, random_bits
from support import inputs, oracle
from support.catalogue import NAMED, VARIETY
from support.comparing import first_difference, same_bits
from support.covering import dealt

compiled: Any = pytest.importorskip("qsim_kernels.numba", reason="needs numba")

FORMATS = [*NAMED, *VARIETY]
NOISY = [qsim.Stochastic(bits, corrected) for bits in (1, 6, 16, 20, 32) for corrected in (False, True)]
SETTINGS = [(how, overflow) for how in (*map(rounding.resolve, oracle.DETERMINISTIC), *NOISY) for overflow in oracle.OVERFLOWS]


def check(x: Tensor, target: torch.dtype, fmt: Format, how: rounding.Rounding, overflow: Any, seed: int, stream: int, offset: int) -> None:
    """Compare the loops with the reference."""
    numbers = GridRounding(read(Grid, fmt.spelling[0]), read(Rule, how.spelling[overflow])), (torch.tensor(seed), stream, offset)
    one, other = torch.empty_like(x, dtype=target), torch.empty_like(x, dtype=target)
    reference.quantize_into(one, x, *numbers)
    compiled.quantize_into(other, x, *numbers)
    assert same_bits(one, other), f"{fmt!r}, {how!r}, {overflow}, {x.dtype} to {target}: {first_difference(x, one, other)}"


def target_of(fmt: Format, dtype: torch.dtype) -> torch.dtype:
    """The dtype itself, or else the narrowest that holds the format."""
    able = holders(fmt)
    return dtype if dtype in able else min(able, key=lambda held: held.itemsize)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("dtype", inputs.DTYPES)
@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test_rounds_as_the_reference_does(fmt: Format, dtype: torch.dtype) -> None:
    narrow = dtype.itemsize == 2
    x = inputs.every_pattern(dtype) if narrow else torch.cat([inputs.random_patterns(dtype, 5000, 0), inputs.edges(fmt, dtype, count=400)])
    x = torch.cat([x, inputs.specials(dtype), inputs.nans(dtype)])
    for how, overflow in dealt(SETTINGS, FORMATS.index(fmt) + inputs.DTYPES.index(dtype), 4 if narrow else 2):
        check(x, target_of(fmt, dtype), fmt, how, overflow, -12345, 2**62 + 7, 13)


@pytest.mark.parametrize("target", inputs.DTYPES)
@pytest.mark.parametrize("source", inputs.DTYPES)
def test_every_pair_of_dtypes(source: torch.dtype, target: torch.dtype) -> None:
    x = torch.cat([inputs.edges(E4M3, source, count=400), inputs.specials(source), inputs.nans(source)])
    for how in (rounding.NEAREST, rounding.resolve("odd"), *NOISY[-2:]):
        check(x, target, E4M3, how, "nonfinite", 1, 2, 3)


def test_bits_after_the_sixteenth_decide_where_the_first_leave_it_open() -> None:
    noise = ElementNoise(5, 7, 0, 4096, torch.device("cpu"))
    # Fractions that leave 16 ones when the first bits are added to them; the four bits below decide with the last 16 random bits.
    fractions = (0xFFFF - noise.first_bits() << 4) + torch.arange(4096) % 16
    normal, subnormal = 1 + fractions / 2**23, (1 + fractions / 2**20) * 2**-9
    for x in (normal.float(), subnormal.float()):
        check(x, torch.float32, E4M3, qsim.Stochastic(), "saturate", 5, 7, 0)
        assert quantized(x, qsim.Stochastic()).unique().numel() == 2


@pytest.mark.parametrize("where", [0, 13, 2**35 - 4, torch.arange(0, 2**40, 2**32 + 3)], ids=str)
@pytest.mark.parametrize("key", [0, 5, -7, 2**62, -(2**63)])
def test_plain_torch_draws_the_same_under_a_key_in_a_tensor(key: int, where: int | torch.Tensor) -> None:
    size = len(where) if isinstance(where, torch.Tensor) else 99
    noise = ElementNoise(key, -3, where, size, torch.device("cpu"))
    assert torch.equal(random_bits(noise, 32), random_bits(noise._replace(seed=torch.tensor(key)), 32))


@settings(max_examples=100)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    stream=st.integers(-(2**63), 2**63 - 1),
    offset=st.integers(0, 2**63 - 3000),
    count=st.integers(0, 2100),
    how=st.sampled_from(NOISY),
)
def test_noise_of_any_place(seed: int, stream: int, offset: int, count: int, how: rounding.Rounding) -> None:
    check(torch.linspace(-3, 3, count), torch.float32, E4M3, how, "saturate", seed, stream, offset)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt.bits <= 12], ids=repr)
def test_codes(fmt: Format) -> None:
    grid, coding = read(Grid, fmt.spelling[0]), read(Coding, fmt.spelling[1])
    x = torch.cat([inputs.edges(fmt, torch.float32, count=400), inputs.specials(torch.float32), inputs.nans(torch.float32)])
    for number, (how, overflow) in enumerate(dealt(SETTINGS, FORMATS.index(fmt), 3)):
        rule, dtype = read(Rule, how.spelling[overflow]), inputs.DTYPES[number % len(inputs.DTYPES)]
        found, due = (torch.empty(x.shape, dtype=inputs.code_dtype(fmt)) for _ in range(2))
        arguments = x.to(dtype), Encoding(grid, rule, coding), (torch.tensor(7), 3, 5)
        assert compiled.encode_into(found, *arguments, True) == reference.encode_into(due, *arguments, True)
        assert torch.equal(found, due), (how, overflow, dtype)
    codes = torch.arange(2**fmt.bits).to(inputs.code_dtype(fmt))
    for dtype in holders(fmt):
        one, other = torch.empty(codes.shape, dtype=dtype), torch.empty(codes.shape, dtype=dtype)
        reference.decode_into(one, codes, grid, coding)
        compiled.decode_into(other, codes, grid, coding)
        assert same_bits(one, other)


@pytest.mark.parametrize("named", ["e4m3", "int8", "e2m3"])
def test_the_default_device_of_factories_does_not_matter(named: str) -> None:
    x = torch.randn(40, 50).t()
    tables = sys.modules["qsim_kernels.numba.tables"]
    tables.code_table.cache_clear()
    tables.value_table.cache_clear()
    with torch.device("meta"):
        codes = compiled_codes(x, named)
        values = torch.empty_like(x)
        compiled.decode_into(values, codes, *map(read, (Grid, Coding), qsim.format(named).spelling))
        rounded = torch.empty_like(x)
        compiled.quantize_into(rounded, x, spelt(named), (None, 0, 0))
    assert same_bits(values, rounded)
    assert same_bits(rounded, qsim.quantize(x, named))


def spelt(named: str) -> GridRounding:
    return GridRounding(read(Grid, qsim.format(named).spelling[0]), read(Rule, rounding.NEAREST.spelling["saturate"]))


def compiled_codes(x: Tensor, named: str) -> Tensor:
    """Codes from the loops, without a check for NaN."""
    codes = torch.empty_like(x, dtype=torch.uint8)
    compiled.encode_into(codes, x, Encoding(*spelt(named), read(Coding, qsim.format(named).spelling[1])), (None, 0, 0), False)
    return codes


def quantized(x: Tensor, how: rounding.Rounding) -> Tensor:
    """Values from plain torch."""
    out = torch.empty_like(x)
    reference.quantize_into(
        out, x, GridRounding(read(Grid, E4M3.spelling[0]), read(Rule, how.spelling["saturate"])), (torch.tensor(1), 0, 0)
    )
    return out


def encoded(x: Tensor, how: rounding.Rounding) -> Tensor:
    """Codes from plain torch."""
    return qsim.encode(quantized(x, how), E4M3)


def test_large_tensors_in_threads_and_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3 * (1 << 16) + 11)
    whole = {how: quantized(x, how) for how in (rounding.NEAREST, qsim.Stochastic())}
    monkeypatch.setattr(chunks, "CHUNK", 50_000)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for how, due in whole.items():
                seed = 1 if how.is_stochastic else None
                assert same_bits(qsim.quantize(x, E4M3, how, seed=seed), due)
                assert same_bits(qsim.decode(qsim.encode(x, E4M3, how, seed=seed), E4M3), due)
    finally:
        torch.set_num_threads(before)


def test_threads_that_call_at_once() -> None:
    x, found = torch.randn(1 << 17), {}

    def work(number: int) -> None:
        found[number] = [qsim.quantize(x, "e4m3", "stochastic", seed=number) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, results in found.items():
        assert all(same_bits(result, qsim.quantize(x, "e4m3", "stochastic", seed=number)) for result in results)


def test_threads_that_need_the_same_rounding_first_get_numbers_at_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that only one of them keeps would be freed while the address is in use."""
    both, found, numbers = threading.Barrier(2, timeout=60), [], compiled.arguments.numbers
    grid, rule = read(Grid, qsim.Float(3, 9).spelling[0]), read(Rule, qsim.Stochastic(7).spelling["saturate"])
    monkeypatch.setattr("qsim_kernels.numba.arguments.numbers", lambda *given: (both.wait(), numbers(*given))[1])
    threads = [threading.Thread(target=lambda: found.append(compiled.strip(grid_bits(grid, wide=False), rule))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1]


def _in_another_process(queue: Any, x: Tensor) -> None:
    torch.set_num_threads(2)
    queue.put(qsim.quantize(x, "e4m3", "stochastic", seed=5).tolist())


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system does not fork")
def test_a_process_that_was_forked_off(monkeypatch: pytest.MonkeyPatch) -> None:
    # Small tensors, because torch's own threads do not survive a fork.
    monkeypatch.setattr("qsim_kernels.numba.threads.GRAIN", 1 << 10)
    x = torch.linspace(-3, 3, 1 << 12)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        due = qsim.quantize(x, "e4m3", "stochastic", seed=5)  # this process has threads
    finally:
        torch.set_num_threads(before)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_in_another_process, args=(queue, x))
    process.start()
    try:
        assert queue.get(timeout=60) == due.tolist()
    finally:
        process.kill()
        process.join()


@pytest.mark.slow
def test_without_numba_plain_torch_gives_the_same_bits() -> None:
    code = """
import sys
sys.modules["numba"] = None
import importlib.util
importlib.util.find_spec = lambda name, find=importlib.util.find_spec: None if name == "numba" else find(name)
import torch, qsim
x = torch.linspace(-3, 3, 1000)
calls = [qsim.quantize(x, "e4m3"), qsim.quantize(x, "e4m3", "stochastic", seed=3), qsim.quantize(x, "nvfp4", "stochastic", seed=3)]
assert "qsim_kernels.numba" not in sys.modules
print([call.double().mul(torch.arange(1000)).sum().item() for call in calls])
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    x = torch.linspace(-3, 3, 1000)
    calls = [qsim.quantize(x, "e4m3"), qsim.quantize(x, "e4m3", "stochastic", seed=3), qsim.quantize(x, "nvfp4", "stochastic", seed=3)]
    assert printed.strip() == str([call.double().mul(torch.arange(1000)).sum().item() for call in calls])


def test_formats_of_both_carriers_are_among_them() -> None:
    assert {fits_single(read(Grid, fmt.spelling[0])) for fmt in FORMATS} == {True, False}
