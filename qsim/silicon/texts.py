"""Golden vectors as text: hexadecimal, CSV, JSON, TestFloat's text, a self-checking testbench, a C test; and results read again."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import torch

from qsim.silicon.circuits import Circuit
from qsim.silicon.golden import values_of
from qsim.silicon.vectors import Vectors
from qsim.text.files import FileError

#: The forms of vectors.
FORMS = ("hex", "csv", "json", "testfloat", "testbench", "c")

_CIRCUIT = "circuit: "
_HEADINGS = ("x", "random", "y")


def text(vectors: Vectors, form: str, file: str = "") -> str:
    """Vectors in one of the forms of `FORMS`.

    Args:
        vectors: The vectors.
        form: `"hex"`, `"csv"`, `"json"`, `"testfloat"`, `"testbench"` or `"c"`.
        file: For a testbench, the file with the vectors in the form `"hex"` that it reads.

    Example:
        >>> from qsim.silicon import FORMS, Circuit, text, vectors
        >>> golden = vectors(Circuit("e2m1", "decode"))
        >>> for form in FORMS[:2]:
        ...     print(text(golden, form).splitlines()[3])
        1_3F000000
        0x2,0x3F800000
    """
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(map(repr, FORMS))}, got {form!r}")
    return _WRITERS[form](vectors, file)


def columns(vectors: Vectors) -> list[tuple[str, int, list[int]]]:
    """The name, the bits and the integers of each column."""
    circuit = vectors.circuit
    widths = (circuit.input.bits, circuit.random_bits, circuit.output.bits)
    numbers = (vectors.x, vectors.random, vectors.y)
    return [(name, width, column.tolist()) for name, width, column in zip(_HEADINGS, widths, numbers, strict=True) if width]


def _rows(vectors: Vectors, prefix: str = "") -> list[list[str]]:
    digits = [[f"{prefix}{value:0{-(-width // 4)}X}" for value in values] for _, width, values in columns(vectors)]
    return [list(row) for row in zip(*digits, strict=True)]


def _hex(vectors: Vectors, file: str) -> str:
    layout = " ".join(f"{name}[{4 * -(-width // 4)}]" for name, width, _ in columns(vectors))
    head = [f"// {_CIRCUIT}{_spelled(vectors.circuit)}", f"// {vectors.circuit.name}: {layout}, the first in the highest bits"]
    return "\n".join([*head, *("_".join(row) for row in _rows(vectors)), ""])


def _csv(vectors: Vectors, file: str) -> str:
    names = ",".join(name for name, *_ in columns(vectors))
    return "\n".join([names, *(",".join(row) for row in _rows(vectors, "0x")), ""])


def _json(vectors: Vectors, file: str) -> str:
    names = [name for name, *_ in columns(vectors)]
    head = json.dumps({"circuit": _spelled(vectors.circuit), "columns": names})
    rows = ",\n".join(map(json.dumps, _rows(vectors, "0x")))
    return f'{head[:-1]}, "vectors": [\n{rows}\n]}}\n'


def _testfloat(vectors: Vectors, file: str) -> str:
    """Operands, result and exception flags, of which only that of inexact results is set."""
    circuit = vectors.circuit
    given, result = values_of(vectors.x, circuit.input), values_of(vectors.y, circuit.output)
    inexact = (given != result) & ~given.isnan()
    return "\n".join([*(" ".join([*row, f"{flag:02X}"]) for row, flag in zip(_rows(vectors), inexact.long().tolist(), strict=True)), ""])


def _testbench(vectors: Vectors, file: str) -> str:
    circuit, parts = vectors.circuit, columns(vectors)
    padded = [4 * -(-width // 4) for _, width, _ in parts]
    ends = [sum(padded[k:]) for k in range(len(parts))]
    fields = {
        name: f"vectors[i][{end - pad + width - 1}:{end - pad}]" for (name, width, _), pad, end in zip(parts, padded, ends, strict=True)
    }
    inputs = [(name, width) for name, width, _ in parts if name != "y"]
    wires = "\n".join(f"  logic [{width - 1}:0] {name};" for name, width in inputs)
    ports = ", ".join(f".{name}({name})" for name, _ in inputs)
    assigned = " ".join(f"{name} = {fields[name]};" for name, _ in inputs)
    shown, written = " ".join(f"{name}=%h" for name, _ in inputs), "_".join("%h" for _ in inputs)
    return _TESTBENCH.format(
        name=circuit.name,
        circuit=_spelled(circuit),
        count=len(vectors),
        last=len(vectors) - 1,
        bits=sum(padded),
        wires=wires,
        ports=ports,
        assigned=assigned,
        file=file,
        width=circuit.output.bits - 1,
        expected=fields["y"],
        shown=shown,
        written=written,
        values=", ".join(name for name, _ in inputs),
    )


_TESTBENCH = """\
// Compares the combinational module {name} with golden vectors: prints the first results that differ,
// and writes all results for `qsim vectors --check {name}.results`.
`timescale 1ns / 1ns
module {name}_test;
  logic [{bits}-1:0] vectors [0:{last}];
{wires}
  wire [{width}:0] y;
  integer i, differing, results;
  {name} circuit ({ports}, .y(y));
  initial begin
    $readmemh("{file}", vectors);
    results = $fopen("{name}.results", "w");
    $fwrite(results, "// circuit: {circuit}\\n");
    differing = 0;
    for (i = 0; i < {count}; i = i + 1) begin
      {assigned}
      #1;
      $fwrite(results, "{written}_%h\\n", {values}, y);
      if (y !== {expected}) begin
        if (differing < 10) $display("differs: {shown} y=%h, expected %h", {values}, y, {expected});
        differing = differing + 1;
      end
    end
    $display("%0d of {count} results differ", differing);
    $finish;
  end
endmodule
"""


def _c(vectors: Vectors, file: str) -> str:
    circuit, parts = vectors.circuit, columns(vectors)
    rows = ",\n".join("    {" + ", ".join(f"0x{value}u" for value in row) + "}" for row in _rows(vectors))
    arguments = ", ".join(f"vectors[i][{k}]" for k in range(len(parts) - 1))
    return _C_TEST.format(name=circuit.name, file=file or "qsim.h", columns=len(parts), last=len(parts) - 1, rows=rows, arguments=arguments)


_C_TEST = """\
/* Compares {name} with golden vectors; returns 1 if a result differs. */
#include <stdio.h>
#include "{file}"

static const uint32_t vectors[][{columns}] = {{
{rows}
}};

int main(void)
{{
    const unsigned long count = sizeof vectors / sizeof vectors[0];
    unsigned long differing = 0;
    for (unsigned long i = 0; i < count; i++) {{
        const uint32_t y = {name}({arguments});
        if (y == vectors[i][{last}])
            continue;
        if (differing++ < 10)
            printf("differs: x=%08lx y=%08lx, expected %08lx\\n",
                   (unsigned long)vectors[i][0], (unsigned long)y, (unsigned long)vectors[i][{last}]);
    }}
    printf("%lu of %lu results differ\\n", differing, count);
    return differing != 0;
}}
"""

_WRITERS = {"hex": _hex, "csv": _csv, "json": _json, "testfloat": _testfloat, "testbench": _testbench, "c": _c}


def _spelled(circuit: Circuit) -> str:
    return f"{circuit.operation} | {circuit.format!r} | {circuit.rounding!r} | {circuit.overflow} | {circuit.source!r}"


def read(content: str, circuit: Circuit | None = None) -> Vectors:
    r"""Vectors with the results of another implementation, in the form `"hex"`, `"csv"`, `"json"` or `"testfloat"`.

    Args:
        content: The text.
        circuit: The circuit whose results they are; by default the one that the text names.

    Raises:
        FileError: If the text does not hold vectors of the circuit.

    Example:
        >>> from qsim.silicon import check, read
        >>> print(check(read("// circuit: round | Float(2, 1) | NEAREST | saturate | Float(8, 23, specials='ieee')\n3FA00000_3FC00000")))
        1 of 1 results differ, first number 1:
          x         0x3FA00000  1.25
          got       0x3FC00000  1.5
          expected  0x3F800000  1
          step      raised_by: a midpoint goes to the other neighbour
        by step of the definition:
                 1  raised_by: a midpoint goes to the other neighbour
    """
    named, rows = _read_json(content) if content.lstrip().startswith("{") else _read_lines(content)
    circuit = circuit or _read_circuit(named)
    count = 3 if circuit.random_bits else 2
    if not rows:
        raise FileError("the results hold no vectors: each line needs an input and a result, as `qsim vectors` writes them")
    for number, row in enumerate(rows, 1):
        if len(row) not in (count, count + 1):
            raise FileError(
                f"vector {number} of {circuit.name} needs {count} numbers ({'x, random, y' if count == 3 else 'x, y'}), got {len(row)}"
            )
    try:
        numbers = torch.tensor([[int(value, 16) for value in row[:count]] for row in rows], dtype=torch.int64)
    except ValueError as error:
        raise FileError(f"numbers of results are hexadecimal: {error}") from None
    x, y = numbers[:, 0], numbers[:, count - 1]
    for name, values, bits in (("x", x, circuit.input.bits), ("y", y, circuit.output.bits)):
        if int(values.min()) < 0 or int(values.max()) >> bits:
            raise FileError(f"{name} of {circuit.name} has {bits} bits, got 0x{int(values.max()):X}")
    return Vectors(circuit, x, numbers[:, 1] if count == 3 else torch.zeros_like(x), y)


def _read_json(content: str) -> tuple[str, Sequence[Sequence[str]]]:
    try:
        body: Any = json.loads(content)
        return body["circuit"], [[str(value) for value in row] for row in body["vectors"]]
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(f"the results are not JSON as `qsim vectors` writes it: {error}") from None


def _read_lines(content: str) -> tuple[str, Sequence[Sequence[str]]]:
    named = re.search(rf"//\s*{_CIRCUIT}(.*)", content)
    lines = (re.sub(r"//.*", "", line).strip() for line in content.splitlines())
    return named[1].strip() if named else "", [re.split(r"[_,\s]+", line) for line in lines if line and not line.startswith("x")]


def _read_circuit(named: str) -> Circuit:
    parts = named.split(" | ")
    if len(parts) != 5:
        raise FileError("the results do not name their circuit: give the format, and the options with which the vectors were written")
    operation, fmt, rounding, overflow, source = parts
    try:
        return Circuit(fmt, operation, rounding.lower() if rounding.isupper() else rounding, overflow, source)  # type: ignore[arg-type]
    except ValueError as error:
        raise FileError(f"the results name a circuit that does not exist: {error}") from None
