"""Emitted code, compiled or simulated: its results for given inputs."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from qsim.silicon import Circuit, Vectors, emit_circuits, text
from qsim.silicon.graphs import routine
from qsim.silicon.printers import c, javascript, systemverilog

WARNINGS = ["-Wall", "-Wextra", "-Werror", "-pedantic"]
SANITIZED = ["-fsanitize=undefined,address", "-fno-sanitize-recover=all"]


def tool(name: str) -> str:
    """The path of a program; the test is skipped where it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def run(*command: str | Path) -> str:
    """The output of a program that must succeed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command[0]}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def _written(folder: Path, x: Tensor, random: Tensor) -> None:
    np.concatenate([column.numpy().astype(np.uint32) for column in (x, random)]).tofile(folder / "in.bin")


def _results(folder: Path, circuits: Sequence[Circuit]) -> list[Tensor]:
    columns = np.fromfile(folder / "out.bin", dtype=np.uint32).reshape(len(circuits), -1)
    return [torch.from_numpy(column.astype(np.int64)) for column in columns]


_C_MAIN = """
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv)
{{
    const size_t count = (size_t)atol(argv[1]);
    uint32_t *x = (uint32_t *)malloc(count * 8), *y = (uint32_t *)malloc(count * 4);
    FILE *in = fopen(argv[2], "rb"), *out = fopen(argv[3], "wb");
    if (argc < 4 || !x || !y || !in || !out || fread(x, 8, count, in) != count) return 1;
{calls}
    free(x); free(y);
    return fclose(in) | fclose(out);
}}
"""


def c_results(
    circuits: Sequence[Circuit],
    x: Tensor,
    random: Tensor,
    folder: Path,
    compiler: str = "gcc",
    flags: Sequence[str] = ("-std=c99", *SANITIZED),
) -> list[Tensor]:
    """The results of circuits' C functions."""
    compile_c(circuits, folder, compiler, flags)
    return compiled_results(circuits, x, random, folder)


def compile_c(circuits: Sequence[Circuit], folder: Path, compiler: str, flags: Sequence[str]) -> None:
    """Compile a program with circuits' C functions."""
    header = c.header("emitted", (), [routine(circuit) for circuit in circuits])
    calls = "\n".join(
        f"    for (size_t i = 0; i < count; i++) y[i] = {circuit.name}(x[i]{', x[count + i]' if circuit.random_bits else ''});\n"
        "    fwrite(y, 4, count, out);"
        for circuit in circuits
    )
    (folder / "emitted.c").write_text(header + _C_MAIN.format(calls=calls))
    run(tool(compiler), *WARNINGS, *flags, "-o", folder / "emitted", folder / "emitted.c")


def compiled_results(circuits: Sequence[Circuit], x: Tensor, random: Tensor, folder: Path) -> list[Tensor]:
    """The results of the program that `compile_c` has made."""
    _written(folder, x, random)
    run(folder / "emitted", str(len(x)), folder / "in.bin", folder / "out.bin")
    return _results(folder, circuits)


_NODE_MAIN = """
import {{ readFileSync, writeFileSync }} from "node:fs";
import * as emitted from "./emitted.mjs";
const given = readFileSync(process.argv[2]);
const words = new Uint32Array(given.buffer, given.byteOffset, given.length / 4), count = words.length / 2;
const results = new Uint32Array({count} * count);
let place = 0;
for (const name of {names}) for (let i = 0; i < count; i++) results[place++] = emitted[name](words[i], words[count + i]);
writeFileSync(process.argv[3], results);
"""


def javascript_results(circuits: Sequence[Circuit], x: Tensor, random: Tensor, folder: Path) -> list[Tensor]:
    """The results of circuits' JavaScript functions, in Node."""
    (folder / "emitted.mjs").write_text(javascript.module((), [routine(circuit) for circuit in circuits]))
    (folder / "main.mjs").write_text(_NODE_MAIN.format(count=len(circuits), names=[circuit.name for circuit in circuits]))
    _written(folder, x, random)
    run(tool("node"), folder / "main.mjs", folder / "in.bin", folder / "out.bin")
    return _results(folder, circuits)


_BENCH = """
module bench;
  logic [63:0] inputs [0:{last}];
  logic [31:0] x, random;
  logic clk = 0;
  integer i, k, file;
{instances}
  initial begin
    $readmemh("{folder}/in.hex", inputs);
    file = $fopen("{folder}/out.txt", "w");
    for (i = 0; i < {count}; i = i + 1) begin
      x = inputs[i][63:32];
      random = inputs[i][31:0];
      #1;
      for (k = 0; k < {stages}; k = k + 1) begin clk = 1; #1; clk = 0; #1; end
      $fwrite(file, "{format}\\n", {outputs});
    end
    $finish;
  end
endmodule
"""


def systemverilog_results(
    circuits: Sequence[Circuit], x: Tensor, random: Tensor, folder: Path, simulator: Callable[[Path, Path], None], stages: int = 0
) -> list[Tensor]:
    """The results of circuits' modules in a simulator."""
    modules = [systemverilog.module(routine(circuit), stages) for circuit in circuits]
    instances = []
    for k, circuit in enumerate(circuits):
        ports = [".clk(clk)"] if stages else []
        ports += [f".x(x[{circuit.input.bits - 1}:0])"]
        ports += [f".random(random[{circuit.random_bits - 1}:0])"] if circuit.random_bits else []
        instances.append(f"  wire [{circuit.output.bits - 1}:0] y{k};\n  {circuit.name} circuit{k} ({', '.join(ports)}, .y(y{k}));")
    names = [f"y{k}" for k in range(len(circuits))]
    bench = _BENCH.format(
        last=len(x) - 1, count=len(x), folder=folder, instances="\n".join(instances), stages=stages,
        format=" ".join(["%h"] * len(circuits)), outputs=", ".join(names),
    )  # fmt: skip
    (folder / "in.hex").write_text("".join(f"{a:08x}{b:08x}\n" for a, b in zip(x.tolist(), random.tolist(), strict=True)))
    (folder / "bench.sv").write_text("\n".join([*modules, bench]))
    simulator(folder / "bench.sv", folder)
    rows = [[int(value, 16) for value in line.split()] for line in (folder / "out.txt").read_text().splitlines()]
    return list(torch.tensor(rows).T)


def icarus(source: Path, folder: Path) -> None:
    """Simulate in Icarus Verilog."""
    run(tool("iverilog"), "-g2012", "-Wall", "-Wno-timescale", "-o", folder / "bench.vvp", source)
    run(tool("vvp"), folder / "bench.vvp")


def verilator(source: Path, folder: Path) -> None:
    """Simulate in Verilator."""
    build = folder / "verilated"
    run(tool("verilator"), "--binary", "--timing", "-Wno-fatal", "--top-module", "bench", "-O1", "-CFLAGS", "-O0", "--Mdir", build, source)
    run(build / "Vbench")


def lint(text: str, folder: Path, name: str) -> None:
    """Check a module with Verilator's lint; every warning is an error."""
    (folder / f"{name}.sv").write_text(text)
    run(tool("verilator"), "--lint-only", "-Wall", folder / f"{name}.sv")


def rows(vectors: Vectors) -> Tensor:
    """The inputs of vectors, as words in rows."""
    return torch.cat([column for part, column in vectors.columns if part.name != "y"], 1)


_C_ROWS = """
#include <stdio.h>
int main(void)
{{
    uint32_t row[{words}], y[{results}];
    while (fread(row, 4, {words}, stdin) == {words}) {{
        {call};
        fwrite(y, 4, {results}, stdout);
    }}
    return 0;
}}
"""


def rows_in_c(vectors: Vectors, folder: Path, compiler: str, flags: Sequence[str]) -> Tensor:
    """The results of a C function for the inputs of vectors, in rows."""
    *given, (output, _) = vectors.columns
    starts = [0, *itertools.accumulate(column.shape[1] for _, column in given)]
    arguments = [f"row + {start}" if part.words else f"row[{start}]" for (part, _), start in zip(given, starts, strict=False)]
    called = f"{vectors.circuit.name}({', '.join([*arguments, *(['y'] if output.words else [])])})"
    main = _C_ROWS.format(words=starts[-1], results=max(output.words, 1), call=called if output.words else f"y[0] = {called}")
    (folder / "rows.c").write_text(emit_circuits("c", [vectors.circuit]) + main)
    run(tool(compiler), *WARNINGS, *flags, "-o", folder / "rows", folder / "rows.c")
    return _of_rows(vectors, folder, f"{folder}/rows < {folder}/rows.bin > {folder}/results.bin")


_NODE_ROWS = """
import {{ readFileSync, writeFileSync }} from "node:fs";
const bytes = readFileSync(process.argv[2]);
const words = new Uint32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4), count = words.length / {words};
const results = new Uint32Array(count * {results});
for (let i = 0; i < count; i++) {{
  const row = Array.from(words.subarray(i * {words}, (i + 1) * {words}));
  results.set([{called}].flat(), i * {results});
}}
writeFileSync(process.argv[3], results);
"""


def rows_in_node(vectors: Vectors, folder: Path) -> Tensor:
    """The results of a JavaScript function for the inputs of vectors, in rows."""
    *given, (output, _) = vectors.columns
    starts = [0, *itertools.accumulate(column.shape[1] for _, column in given)]
    pairs = zip(given, itertools.pairwise(starts), strict=True)
    arguments = [f"row.slice({start}, {end})" if part.words else f"row[{start}]" for (part, _), (start, end) in pairs]
    script = _NODE_ROWS.format(words=starts[-1], results=max(output.words, 1), called=f"{vectors.circuit.name}({', '.join(arguments)})")
    (folder / "rows.mjs").write_text(emit_circuits("javascript", [vectors.circuit]) + script)
    return _of_rows(vectors, folder, f"{tool('node')} {folder}/rows.mjs {folder}/rows.bin {folder}/results.bin")


def _of_rows(vectors: Vectors, folder: Path, command: str) -> Tensor:
    rows(vectors).numpy().astype(np.uint32).tofile(folder / "rows.bin")
    run("sh", "-c", command)
    results = torch.from_numpy(np.fromfile(folder / "results.bin", dtype=np.uint32).astype(np.int64))
    return results.view(vectors.y.shape)


def simulated(
    vectors: Vectors, folder: Path, simulator: str, stages: int = 0, registers: int | None = None, module: str | None = None
) -> str:
    """Run the testbench of `qsim vectors` in `"icarus"` or `"verilator"`, and return what it prints.

    The module is that of `qsim emit`, by default with as many registers as the testbench expects, or a given one.
    """
    (folder / "vectors.hex").write_text(text(vectors, "hex"))
    bench = text(vectors, "testbench", f"{folder}/vectors.hex", stages=stages)
    bench = bench.replace(f'"{vectors.circuit.name}.results"', f'"{folder}/results.hex"')
    if module is None:
        module = emit_circuits("systemverilog", [vectors.circuit], stages=stages if registers is None else registers)
    (folder / "simulated.sv").write_text(module + bench)
    if simulator == "icarus":
        run(tool("iverilog"), "-g2012", "-o", folder / "simulated.vvp", folder / "simulated.sv")
        return run(tool("vvp"), folder / "simulated.vvp").strip()
    build, top = folder / "simulated", f"{vectors.circuit.name}_test"
    flags = ["--binary", "--timing", "-Wno-fatal", "-O1", "-CFLAGS", "-O0", "--top-module", top, "--Mdir", build]
    run(tool("verilator"), *flags, folder / "simulated.sv")
    return run(build / f"V{top}").partition("\n- ")[0].strip()
