"""Cost of a circuit in hardware, as Yosys maps its module to the cells of an FPGA and to gates."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from qsim.formats.base import check_flag
from qsim.silicon.graphs import AnyCircuit, routine
from qsim.silicon.printers import systemverilog

_FPGA = """\
read_verilog -sv {source}
synth_xilinx -flatten -noiopad -top {top}
"""
_GATES = """\
read_verilog -sv {source}
synth -flatten -top {top}
abc -g AND,OR,XOR,MUX
opt_clean
"""
_REPORT = """\
tee -o {folder}/cells.txt stat
tee -o {folder}/depth.txt ltp -noff
"""


class Fpga(NamedTuple):
    """Cells of a Xilinx FPGA of the seventh series.

    Attributes:
        luts: Lookup tables.
        carries: Carry cells, of four bits each.
        registers: Flip-flops.
        depth: Cells in a row.
    """

    luts: int
    carries: int
    registers: int
    depth: int


class Gates(NamedTuple):
    """Gates with two inputs, inverters and multiplexers.

    Attributes:
        gates: Their number.
        depth: Gates in a row.
    """

    gates: int
    depth: int


class Cost(NamedTuple):
    """The cost of a circuit in hardware.

    Attributes:
        fpga: In cells of an FPGA.
        gates: In gates.

    Example:
        >>> from qsim.silicon import Cost
        >>> from qsim.silicon.synthesis import Fpga, Gates
        >>> Cost(Fpga(luts=65, carries=14, registers=0, depth=15), Gates(gates=203, depth=28)).fpga.luts
        65
    """

    fpga: Fpga
    gates: Gates


def cost(circuit: AnyCircuit, stages: int = 0, generator: bool = False, limit: float | None = None) -> Cost:
    """Synthesize a circuit with Yosys and count its cells.

    Args:
        circuit: The circuit.
        stages: See `emit`.
        generator: See `emit`.
        limit: The seconds that Yosys may take for LUTs, and as many for gates; no limit by default.

    Raises:
        FileNotFoundError: If Yosys is not installed.
        RuntimeError: If it fails.
        TimeoutError: If it takes longer than `limit`.

    Example:
        >>> from qsim.silicon import Circuit, cost
        >>> cost(Circuit("int4", "decode"))  # doctest: +SKIP
        Cost(fpga=Fpga(luts=36, carries=6, registers=0, depth=10), gates=Gates(gates=36, depth=8))
    """
    check_flag("cost", "generator", generator)
    source = systemverilog.module(routine(circuit), stages, generator)
    return Cost(fpga(source, circuit.name, limit), gates(source, circuit.name, limit))


def fpga(source: str, top: str, limit: float | None = None) -> Fpga:
    """The cells of an FPGA for a module.

    Args:
        source: SystemVerilog.
        top: The module's name.
        limit: The seconds that it may take.
    """
    cells, depth = _synthesized(source, top, _FPGA, limit)
    return Fpga(_count(cells, r"LUT\d|INV"), _count(cells, "CARRY4"), _count(cells, r"FD\w+"), depth)


def gates(source: str, top: str, limit: float | None = None) -> Gates:
    """The gates for a module; see `fpga`."""
    cells, depth = _synthesized(source, top, _GATES, limit)
    return Gates(_count(cells, r"\$_(?:AND|OR|XOR|MUX|NOT)_"), depth)


def _synthesized(source: str, top: str, script: str, limit: float | None) -> tuple[str, int]:
    """Yosys's list of cells, and how many are in a row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "circuit.sv").write_text(source)
        run_yosys((script + _REPORT).format(source=folder / "circuit.sv", top=top, folder=folder), folder, f"synthesize {top}", limit)
        longest = re.search(r"length=(\d+)", (folder / "depth.txt").read_text())
        return (folder / "cells.txt").read_text(), int(longest[1]) if longest else 0


def run_yosys(script: str, folder: Path, what: str, limit: float | None) -> None:
    """Run a script of Yosys.

    Args:
        script: The script.
        folder: Where it is written.
        what: What it does, for errors.
        limit: The seconds that it may take.
    """
    yosys = shutil.which("yosys")
    if yosys is None:
        raise FileNotFoundError("qsim cost and qsim prove need Yosys, which is not installed: `apt install yosys`, or https://yosyshq.net")
    (folder / "script.ys").write_text(script)
    _run([yosys, "-q", "-s", str(folder / "script.ys")], what, limit)


def _run(command: list[str], what: str, limit: float | None) -> None:
    """Run Yosys, and end it with the programs that it has started if it takes too long."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            _, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise TimeoutError(f"Yosys could not {what} in {limit:g} seconds: give it more, or fewer products") from None
    if process.returncode:
        raise RuntimeError(f"Yosys cannot {what}: {errors.strip()}")


def _count(cells: str, names: str) -> int:
    return sum(int(count) for count in re.findall(rf"^\s+(?:{names})\s+(\d+)", cells, re.MULTILINE))
