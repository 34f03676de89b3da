"""Values of one grid and codes of another in one read: Triton compared with the reference, bit for bit, and with two separate calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qsim import Stochastic, rounding as roundings
from qsim.formats import E2M1, E4M3, E4M3FNUZ, E5M2, E8M0, FP16, Fixed, Float, Format, Int, PowerOfTwo, holds
from qsim_kernels import Rule, torch as reference
from qsim_kernels.numbers.encoding import Encoding
from qsim_kernels.numbers.grid import GridRounding, spell
from support import inputs
from support.comparing import first_difference, same_bits
from support.side_by_side import DEVICE, dealt, difficult, kernels, rule, seed

Rounding = str | roundings.Rounding

E4M0 = Float(4, 0)

#: Values and codes: of one grid, for which the kernel has a special path, and of two grids.
FORMATS: tuple[tuple[Format, Format], ...] = (
    (E4M3, E4M3),
    (E4M0, E4M0),
    (E2M1, E2M1),
    (FP16, FP16),
    (Float(4, 3, specials="ieee", subnormals=False),) * 2,
    (E4M3, E5M2),
    (E5M2, E2M1),
    (Int(8), Int(4)),
    (Int(4), E4M3FNUZ),
    (E4M3, FP16),
    (FP16, E4M0),
    (E8M0, PowerOfTwo(5, bias=20)),
    (Fixed(8, 4, symmetric=True), Int(32)),
)

#: How values and codes are rounded, and how overflow is handled.
RULES: tuple[tuple[Rounding, str, Rounding, str], ...] = (
    ("nearest", "saturate", "stochastic", "saturate"),
    ("stochastic", "saturate", "stochastic", "saturate"),
    ("up", "saturate", "down", "nonfinite"),
    ("odd", "nonfinite", Stochastic(6, correction=True), "saturate"),
    (Stochastic(6), "nonfinite", "nearest_up", "nonfinite"),
    (Stochastic(17), "saturate", Stochastic(32, correction=True), "nonfinite"),
)

CASES = [pytest.param(pair, torch.float32, id=f"{pair[0]!r}-{pair[1]!r}-float32") for pair in FORMATS]
CASES += [
    pytest.param(pair, dtype, id=f"{pair[0]!r}-{pair[1]!r}-{dtype}")
    for pair in ((E4M3, E4M3), (Int(8), Int(4)), (E4M3, FP16))
    for dtype in inputs.DTYPES[1:]
]

# The interpreter computes with NumPy, which warns about NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


def both(
    x: Tensor, formats: tuple[Format, Format], rules: tuple[Rule, Rule], dtype: torch.dtype | None = None, number: int = 3**25
) -> list[tuple[Tensor, Tensor]]:
    """Values and codes from the reference and from the kernels."""
    (fmt, code_fmt), (how, code_how) = formats, rules
    results = []
    for module in (reference, kernels):
        out = torch.full_like(x, 77, dtype=dtype)
        codes = torch.full_like(x, 77, dtype=inputs.code_dtype(code_fmt))
        module.quantize_and_encode_into(
            out,
            codes,
            x,
            GridRounding(fmt.grid, how),
            (seed(number), 5, 0),
            Encoding(code_fmt.grid, code_how, code_fmt.coding),
            (seed(number), -9, 0),
        )
        results.append((out, codes))
    return results


def check(x: Tensor, formats: tuple[Format, Format], rules: tuple[Rule, Rule], dtype: torch.dtype | None = None) -> None:
    """Compare both results bit for bit."""
    (a, codes), (b, other) = both(x, formats, rules, dtype)
    for first, second in ((a, b), (codes, other)):
        assert not first_difference(x, first, second), f"{rules}: {first_difference(x, first, second)}"


def rules_of(given: tuple[Rounding, str, Rounding, str], dtype: torch.dtype) -> tuple[Rule, Rule]:
    """Both roundings, for tensors of a dtype."""
    return rule(given[0], given[1]), rule(given[2], given[3])


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("formats", "source"), CASES)
def test_triton_and_reference_agree(formats: tuple[Format, Format], source: torch.dtype) -> None:
    # Difficult numbers for either format, including specials and subnormals; together more than one block of the kernel.
    x = torch.cat([difficult(fmt, source) for fmt in dict.fromkeys(formats)])
    target = source if holds(source, formats[0]) else torch.float32
    # Each of them is compiled on a GPU, so the other dtypes only get half of them.
    for given in RULES if source == torch.float32 else RULES[1::2]:
        check(x, formats, rules_of(given, source), target)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("source", inputs.DTYPES)
@pytest.mark.parametrize("target", inputs.DTYPES)
def test_any_carrier(source: torch.dtype, target: torch.dtype) -> None:
    x = difficult(E4M3, source)
    settings = [((E4M3, E4M3), RULES[1]), ((E5M2, E2M1), RULES[0])]
    for formats, given in dealt(settings, inputs.DTYPES.index(source) + inputs.DTYPES.index(target), 2):
        check(x, formats, rules_of(given, source), target)


@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E4M3, E2M1)], ids=repr)
def test_any_count_and_no_write_beyond_the_end(formats: tuple[Format, Format]) -> None:
    # A count of 1 or a multiple of 16 comes first: a kernel compiled for it must also work for the others.
    memory = torch.randn(2 * 2048 + 40, device=DEVICE)
    rules = rules_of(RULES[1], torch.float32)
    (values, codes), _ = both(memory, formats, rules)
    for count in (0, 1, 16, 2048, 7, 17, 2047, 2049, 4096, 4097):
        out, written = torch.full_like(memory, 77), torch.full_like(codes, 99)
        rounding, encoding = GridRounding(formats[0].grid, rules[0]), Encoding(formats[1].grid, rules[1], formats[1].coding)
        noise, code_noise = (seed(3**25), 5, 0), (seed(3**25), -9, 0)
        kernels.quantize_and_encode_into(out[:count], written[:count], memory[:count], rounding, noise, encoding, code_noise)
        assert same_bits(out[:count], values[:count]), count
        assert same_bits(written[:count], codes[:count]), count
        assert (out[count:] == 77).all(), count
        assert (written[count:] == 99).all(), count


def test_any_strides_and_alignment() -> None:
    x = torch.randn(901, device=DEVICE)[1:].view(30, 30)
    rules = rules_of(RULES[1], torch.float32)
    rounding, encoding = GridRounding(E4M3.grid, rules[0]), Encoding(E4M3.grid, rules[1], E4M3.coding)
    numbers = rounding, (seed(3**25), 5, 0), encoding, (seed(3**25), -9, 0)
    ((values, codes), _) = both(x.clone(), (E4M3, E4M3), rules)
    for source in (x.clone(), x, x.t().contiguous().t()):
        for start in (0, 1, 3):
            memory = torch.full((904,), 77.0, device=DEVICE)
            code_memory = torch.full((30, 60), 99, dtype=torch.uint8, device=DEVICE)
            out = memory[start : start + 900].view(30, 30)
            for written in (code_memory.view(-1)[start : start + 900].view(30, 30), code_memory[:, ::2].t()):
                memory.fill_(77)
                code_memory.fill_(99)
                kernels.quantize_and_encode_into(out, written, source, *numbers)
                assert same_bits(out, values)
                assert same_bits(written, codes)
                assert int((memory == 77).sum()) == 4
                assert int((code_memory == 99).sum()) - int((codes == 99).sum()) == 900


def test_values_and_codes_draw_from_their_own_streams(device: torch.device) -> None:
    # The operator combines two others: it returns the same as they do, wherever the seed is stored.
    x = torch.cat([torch.randn(3001, device=device), inputs.specials(torch.float32).to(device)])
    how = spell(rule("stochastic", "saturate"))
    grid, coding = spell(E4M3.grid), spell(E4M3.coding)
    operators: Any = torch.ops.qsim
    for given in {torch.device("cpu"), device}:
        number = torch.tensor(77, device=given)
        values, codes = operators.quantize_and_encode(x, number, grid, how, 1, torch.bfloat16, grid, how, coding, 2)
        assert same_bits(values, operators.quantize(x, number, grid, how, 1, 0, torch.bfloat16))
        assert same_bits(codes, operators.encode(x, number, grid, how, coding, 2, 0, False))
        same_stream = operators.quantize_and_encode(x, number, grid, how, 1, torch.bfloat16, grid, how, coding, 1)
        decoded = [operators.decode(each, grid, coding, torch.bfloat16) for each in (codes, same_stream[1])]
        assert not same_bits(decoded[0], values)
        assert same_bits(decoded[1], values)


def test_nan_without_a_code_is_stored_as_the_largest_value(device: torch.device) -> None:
    x = inputs.nans(torch.float32).to(device)
    how = spell(rule("nearest", "saturate"))
    values, codes = torch.ops.qsim.quantize_and_encode(
        x, None, spell(E4M3.grid), how, 0, torch.float32, spell(E2M1.grid), how, spell(E2M1.coding), 0
    )
    assert values.isnan().all()
    assert codes.tolist() == [0b0111] * len(x)
