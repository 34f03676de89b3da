"""The results that a circuit must have, computed with plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim.formats import FP32, Format
from qsim.functional import decode, encode
from qsim.silicon.blocks import BlockCircuit
from qsim.silicon.dots import Dot
from qsim.silicon.generators import Philox
from qsim.silicon.graphs import AnyCircuit
from qsim.silicon.sum_graphs import added
from qsim.silicon.values import Meaning
from qsim_kernels.arithmetic import philox
from qsim_kernels.meanings import python, torch as meaning
from qsim_kernels.numbers.carrier import DOUBLE, rounding_bits, used_bits, variant_of
from qsim_kernels.numbers.encoding import code_dtype
from qsim_kernels.numbers.grid import Rule
from qsim_kernels.torch.scaling import kept_from_zero, scales_into, under_whole

_WORD = (1 << 32) - 1
#: The definition as Python computes it.
FOR_INTEGERS = Meaning(DOUBLE, lambda module: python.functions(module, DOUBLE))


def results(circuit: AnyCircuit, x: Tensor, random: Tensor, meaning_of_sums: Meaning = FOR_INTEGERS) -> Tensor:
    """The results of a circuit.

    Args:
        circuit: The circuit.
        x: Inputs, int64: codes of `circuit.input`; of a circuit with several inputs, rows of them.
        random: Random integers of `circuit.random_bits` bits, int64; rows where a circuit reads several.
        meaning_of_sums: How sums are computed.

    Returns:
        int64 codes of the results; rows where there are several.

    Example:
        >>> import torch
        >>> from qsim.silicon import Circuit
        >>> from qsim.silicon.golden import results
        >>> one_and_a_half = torch.tensor([0x3FC00000])
        >>> results(Circuit("e2m1", "encode"), one_and_a_half, torch.zeros(1, dtype=torch.int64))
        tensor([3])
    """
    if isinstance(circuit, Philox):
        return torch.tensor([FOR_INTEGERS.functions(philox).philox(*row) for row in x.tolist()], dtype=torch.int64).view(-1, 4)
    if isinstance(circuit, Dot):
        return _sums(circuit, x, random, meaning_of_sums)
    if isinstance(circuit, BlockCircuit):
        return _scales(circuit, x) if circuit.operation == "scale" else _elements(circuit, x, random)
    if circuit.operation == "decode":
        return _words(decode(x.to(code_dtype(circuit.format.bits)), circuit.format))
    values = values_of(x, circuit.input)
    rounded = _rounded(circuit.format, circuit.rule, values, random)
    return _words(rounded) if circuit.operation == "round" else _codes(rounded, circuit.format)


def _codes(values: Tensor, fmt: Format) -> Tensor:
    """The codes of values of a format."""
    codes: Tensor = values.view(torch.int32) if fmt == FP32 else encode(values, fmt, overflow="nonfinite", check=False)
    plain: Tensor = codes.to(torch.int64) & ((1 << fmt.bits) - 1)
    return plain


def _scales(circuit: BlockCircuit, x: Tensor) -> Tensor:
    """The codes of the scales of blocks, which are rows."""
    amaxes = values_of(x[:, : circuit.format.size], circuit.source).abs().amax(1)
    under = values_of(x[:, -1], FP32) if circuit.has_whole else None
    scales = torch.empty_like(amaxes)
    scales_into(scales, amaxes, under, circuit.scales)
    return _codes(scales, circuit.output)


def _elements(circuit: BlockCircuit, x: Tensor, random: Tensor) -> Tensor:
    """The codes of elements under scales, both in rows."""
    values, scales = (values_of(column.contiguous(), fmt) for column, fmt in zip(x.T, (circuit.source, circuit.format.scale), strict=False))
    whole = under_whole(scales, values_of(x[:, -1].contiguous(), FP32)) if circuit.has_whole else scales
    quotients = values * whole.reciprocal()
    if circuit.rule.leaves_zero:
        quotients = kept_from_zero(quotients, values)
    return _codes(_rounded(circuit.output, circuit.rule, quotients, random.reshape(-1)[: len(x)]), circuit.output)


def _sums(circuit: Dot, x: Tensor, random: Tensor, how: Meaning) -> Tensor:
    codes = [added(how, circuit, row, drawn) for row, drawn in zip(x.tolist(), random.tolist(), strict=True)]
    return torch.tensor(codes, dtype=torch.int64)


def _words(x: Tensor) -> Tensor:
    """Float32's bits, without a sign."""
    words: Tensor = x.view(torch.int32).to(torch.int64) & _WORD
    return words


def values_of(codes: Tensor, fmt: Format) -> Tensor:
    """The float32 values of int64 codes."""
    if fmt == FP32:
        singles: Tensor = codes.to(torch.int32).view(torch.float32)
        return singles
    values: Tensor = decode(codes.to(code_dtype(fmt.bits)), fmt)
    return values


def _rounded(fmt: Format, rule: Rule, x: Tensor, random: Tensor) -> Tensor:
    how = rounding_bits(fmt.grid, rule, wide=False)
    functions = meaning.rounding(how.carrier)
    used = used_bits(how.carrier, rule.bits, rule.correction)
    drawn = functions.random_bits(random << 32 - rule.bits, used)
    wide = how.carrier == DOUBLE
    bits = x.double().view(torch.int64) if wide else x.view(torch.int32)
    result: Tensor = functions.round_bits(bits, drawn, how, variant_of(how, rule))
    if not wide:
        return result.view(torch.float32)
    values = result.view(torch.float64)
    # Conversion keeps the upper bits of NaN only.
    return torch.where(values.isnan(), torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32), values.float())
