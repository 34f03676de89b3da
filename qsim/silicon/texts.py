"""Golden vectors as text: hexadecimal, CSV, JSON, TestFloat's text, a self-checking testbench, a C test; and results read again."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qsim.silicon.blocks import BlockCircuit
from qsim.silicon.circuits import Circuit
from qsim.silicon.dots import Dot
from qsim.silicon.emission import check_stages
from qsim.silicon.generators import Philox
from qsim.silicon.golden import values_of
from qsim.silicon.graphs import AnyCircuit, routine
from qsim.silicon.printers.routines import Parameter, parameters
from qsim.silicon.vectors import Vectors
from qsim.text.files import FileError

#: The forms of vectors.
FORMS = ("hex", "csv", "json", "testfloat", "testbench", "c")

_CIRCUIT = "circuit: "


def text(vectors: Vectors, form: str, file: str = "", *, stages: int = 0) -> str:
    """Write vectors in one of the forms of `FORMS`.

    Args:
        vectors: The vectors.
        form: `"hex"`, `"csv"`, `"json"`, `"testfloat"`, `"testbench"` or `"c"`.
        file: For a testbench, the file with the vectors in the form `"hex"` that it reads; for a C test, the header.
        stages: For a testbench, the registers between input and output of the module, as in `emit`: each vector stays at the inputs for
            as many clock edges. A testbench cannot compare modules of `emit(…, generator=True)`, whose random bits it does not set.

    Raises:
        ValueError: If an argument is not one of these, or TestFloat's text cannot hold the vectors.

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
    if form == "testbench":
        return _testbench(vectors, file, stages)
    if stages:
        raise ValueError(f"stages are for a testbench, got form={form!r}")
    return _WRITERS[form](vectors, file)


def columns(vectors: Vectors) -> list[tuple[str, int, list[int]]]:
    """The name, the bits and the integers of each column: of arrays all elements in one, the first in the lowest bits."""
    return [(part.name, max(part.words, 1) * part.bits, _packed(part.bits, words)) for part, words in vectors.columns]


def _packed(bits: int, words: Tensor) -> list[int]:
    return [sum(word << k * bits for k, word in enumerate(row)) for row in words.tolist()]


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
    if not isinstance(circuit, Circuit):
        raise ValueError(f"TestFloat's text has results of one operand: write vectors of {circuit.name} in another form")
    given, result = values_of(vectors.x, circuit.input), values_of(vectors.y, circuit.output)
    inexact = (given != result) & ~given.isnan()
    return "\n".join([*(" ".join([*row, f"{flag:02X}"]) for row, flag in zip(_rows(vectors), inexact.long().tolist(), strict=True)), ""])


def _testbench(vectors: Vectors, file: str, stages: int) -> str:
    check_stages(stages)
    parts, output = columns(vectors), vectors.columns[-1][0]
    padded = [4 * -(-width // 4) for _, width, _ in parts]
    ends = [sum(padded[k:]) for k in range(len(parts))]
    fields = {
        name: f"vectors[i][{end - pad + width - 1}:{end - pad}]" for (name, width, _), pad, end in zip(parts, padded, ends, strict=True)
    }
    inputs = [(name, width) for name, width, _ in parts if name != "y"]
    wires = "\n".join([*(["  logic clk = 0;"] if stages else []), *(f"  logic [{width - 1}:0] {name};" for name, width in inputs)])
    ports = ", ".join(f".{name}({name})" for name in [*(["clk"] if stages else []), *(name for name, _ in inputs)])
    assigned = " ".join(f"{name} = {fields[name]};" for name, _ in inputs)
    shown, written = " ".join(f"{name}=%h" for name, _ in inputs), "_".join("%h" for _ in inputs)
    return _TESTBENCH.format(
        name=vectors.circuit.name,
        module=f"module {vectors.circuit.name} of `--stages {stages}`" if stages else f"combinational module {vectors.circuit.name}",
        clocked=f" repeat ({stages}) begin clk = 1; #1; clk = 0; #1; end" if stages else "",
        circuit=_spelled(vectors.circuit).replace('"', '\\"'),
        count=len(vectors),
        last=len(vectors) - 1,
        bits=sum(padded),
        wires=wires,
        ports=ports,
        assigned=assigned,
        file=file,
        width=max(output.words, 1) * output.bits - 1,
        expected=fields["y"],
        shown=shown,
        written=written,
        values=", ".join(name for name, _ in inputs),
    )


_TESTBENCH = """\
// Compares the {module} with golden vectors: prints the first results that differ,
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
      #1;{clocked}
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
    *given, (output, _) = vectors.columns
    words = torch.cat([column for _, column in vectors.columns], 1)
    starts = [0, *itertools.accumulate(column.shape[1] for _, column in vectors.columns)]
    arguments = [f"row + {start}" if part.words else f"row[{start}]" for (part, _), start in zip(given, starts, strict=False)]
    called = f"{vectors.circuit.name}({', '.join([*arguments, *(['y'] if output.words else [])])})"
    return _C_TEST.format(
        name=vectors.circuit.name,
        file=file or "qsim.h",
        columns=words.shape[1],
        inputs=starts[-2],
        outputs=max(output.words, 1),
        rows=",\n".join("    {" + ", ".join(f"0x{word:X}u" for word in row) + "}" for row in words.tolist()),
        call=called if output.words else f"y[0] = {called}",
    )


_C_TEST = """\
/* Compares {name} with golden vectors; returns 1 if a result differs. */
#include <stdio.h>
#include <string.h>
#include "{file}"

static const uint32_t vectors[][{columns}] = {{
{rows}
}};

static void print_words(const char *name, const uint32_t *words, int count)
{{
    printf(" %s=", name);
    while (count-- > 0)
        printf("%08lx", (unsigned long)words[count]);
}}

int main(void)
{{
    const unsigned long count = sizeof vectors / sizeof vectors[0];
    unsigned long differing = 0;
    for (unsigned long i = 0; i < count; i++) {{
        const uint32_t *row = vectors[i];
        uint32_t y[{outputs}];
        {call};
        if (memcmp(y, row + {inputs}, sizeof y) == 0)
            continue;
        if (differing++ < 10) {{
            printf("differs:");
            print_words("inputs", row, {inputs});
            print_words("y", y, {outputs});
            print_words("expected", row + {inputs}, {outputs});
            printf("\\n");
        }}
    }}
    printf("%lu of %lu results differ\\n", differing, count);
    return differing != 0;
}}
"""

_WRITERS = {"hex": _hex, "csv": _csv, "json": _json, "testfloat": _testfloat, "c": _c}


def _spelled(circuit: AnyCircuit) -> str:
    """The kind of a circuit and its arguments."""
    if isinstance(circuit, Philox):
        return "philox"
    if isinstance(circuit, BlockCircuit):
        return f"block {circuit.operation} | {circuit.format!r} | {circuit.rounding!r} | {circuit.source!r}"
    if isinstance(circuit, Dot):
        return f"dot | {circuit.accumulator!r} | {circuit.a!r} | {circuit.b!r} | {circuit.length}"
    return f"{circuit.operation} | {circuit.format!r} | {circuit.rounding!r} | {circuit.overflow} | {circuit.source!r}"


def read(content: str, circuit: AnyCircuit | None = None) -> Vectors:
    r"""Parse vectors with the results of another implementation, in the form `"hex"`, `"csv"`, `"json"` or `"testfloat"`.

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
    circuit = _read_circuit(named) if circuit is None else circuit
    whole = routine(circuit)
    given, count = parameters(whole), len(whole.result) if isinstance(whole.result, tuple) else 0
    parts = [*given, Parameter("y", whole.width, count)]
    if not rows:
        raise FileError("the results hold no vectors: each line needs an input and a result, as `qsim vectors` writes them")
    for number, row in enumerate(rows, 1):
        if len(row) not in (len(parts), len(parts) + 1):
            names = ", ".join(part.name for part in parts)
            raise FileError(f"vector {number} of {circuit.name} needs {len(parts)} numbers ({names}), got {len(row)}")
    try:
        columns = list(zip(*([int(value, 16) for value in row[: len(parts)]] for row in rows), strict=True))
    except ValueError as error:
        raise FileError(f"numbers of results are hexadecimal: {error}") from None
    words = {part.name: _unpacked(circuit.name, part, column) for part, column in zip(parts, columns, strict=True)}
    y, random = words.pop("y"), words.pop("random", torch.zeros(len(rows), 0 if not isinstance(circuit, Circuit) else 1, dtype=torch.int64))
    x = torch.cat(list(words.values()), 1)
    if isinstance(circuit, Circuit):
        x, random = x.view(-1), random.view(-1)
    return Vectors(circuit, x, random, y if count else y.view(-1))


def _unpacked(name: str, part: Parameter, column: Sequence[int]) -> Tensor:
    """The elements of an array, or a word, in a row."""
    count, last = max(part.words, 1), (1 << part.bits) - 1
    if min(column) < 0 or max(column) >> count * part.bits:
        raise FileError(f"{part.name} of {name} has {count * part.bits} bits, got 0x{max(column):X}")
    return torch.tensor([[value >> k * part.bits & last for k in range(count)] for value in column], dtype=torch.int64)


def _read_json(content: str) -> tuple[str, Sequence[Sequence[str]]]:
    try:
        body: Any = json.loads(content)
        return body["circuit"], [[str(value) for value in row] for row in body["vectors"]]
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(f"the results are not JSON as `qsim vectors` writes it: {error}") from None


def _read_lines(content: str) -> tuple[str, Sequence[Sequence[str]]]:
    named = re.search(rf"//\s*{_CIRCUIT}(.*)", content)
    lines = (re.sub(r"//.*", "", line).strip() for line in content.splitlines())
    return named[1].strip() if named else "", [re.split(r"[_,\s]+", line) for line in lines if line and not line.endswith("y")]


def _read_circuit(named: str) -> AnyCircuit:
    kind, *parts = named.split(" | ")
    try:
        match kind, len(parts):
            case "philox", 0:
                return Philox()
            case "dot", 4:
                accumulator, a, b, length = parts
                return Dot(accumulator, a, b, int(length))
            case "block scale" | "block encode", 3:
                fmt, rounding, source = parts
                return BlockCircuit(fmt, kind.removeprefix("block "), _rounding(rounding), source)  # type: ignore[arg-type]
            case _, 4:
                fmt, rounding, overflow, source = parts
                return Circuit(fmt, kind, _rounding(rounding), overflow, source)  # type: ignore[arg-type]
    except ValueError as error:
        raise FileError(f"the results name a circuit that does not exist: {error}") from None
    raise FileError("the results do not name their circuit: give the format, and the options with which the vectors were written")


def _rounding(spelled: str) -> str:
    """The name of a rounding, which prints as a constant if it has no arguments."""
    return spelled.lower() if spelled.isupper() else spelled
