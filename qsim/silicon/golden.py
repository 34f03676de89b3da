"""The results that a circuit must have, computed with plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim.formats import FP32, Format
from qsim.functional import decode, encode
from qsim.silicon.circuits import Circuit
from qsim.silicon.dots import Dot
from qsim.silicon.generators import Philox
from qsim.silicon.graphs import AnyCircuit
from qsim.silicon.sum_graphs import added
from qsim.silicon.values import Meaning
from qsim_kernels.arithmetic.philox import philox
from qsim_kernels.meanings import python, torch as meaning
from qsim_kernels.numbers.carrier import DOUBLE, rounding_bits, used_bits, variant_of
from qsim_kernels.numbers.encoding import code_dtype

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
        return torch.tensor([philox(*row) for row in x.tolist()], dtype=torch.int64).view(-1, 4)
    if isinstance(circuit, Dot):
        return _sums(circuit, x, random, meaning_of_sums)
    values = values_of(x, circuit.input)
    if circuit.operation == "decode":
        return _words(values)
    rounded = _rounded(circuit, values, random)
    if circuit.operation == "round":
        return _words(rounded)
    codes: Tensor = encode(rounded, circuit.format, overflow="nonfinite", check=False)
    plain: Tensor = codes.to(torch.int64) & ((1 << circuit.format.bits) - 1)
    return plain


def _sums(circuit: Dot, x: Tensor, random: Tensor, how: Meaning) -> Tensor:
    size, rows = circuit.length, zip(x.tolist(), random.tolist(), strict=True)
    codes = [added(how, circuit, row[:size], row[size : 2 * size], row[-1], drawn) for row, drawn in rows]
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


def _rounded(circuit: Circuit, x: Tensor, random: Tensor) -> Tensor:
    how = rounding_bits(circuit.format.grid, circuit.rule, wide=False)
    functions = meaning.rounding(how.carrier)
    used = used_bits(how.carrier, circuit.rule.bits, circuit.rule.correction)
    drawn = functions.random_bits(random << 32 - circuit.rule.bits, used)
    wide = how.carrier == DOUBLE
    bits = x.double().view(torch.int64) if wide else x.view(torch.int32)
    result: Tensor = functions.round_bits(bits, drawn, how, variant_of(how, circuit.rule))
    if not wide:
        return result.view(torch.float32)
    values = result.view(torch.float64)
    # Conversion keeps the upper bits of NaN only.
    return torch.where(values.isnan(), torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32), values.float())
