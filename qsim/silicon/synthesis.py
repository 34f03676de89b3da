"""What a unit costs in hardware, as Yosys maps its module to the cells of an FPGA and to gates."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from qsim.silicon.graphs import routine
from qsim.silicon.units import Unit
from qsim_kernels.meanings import systemverilog

_SCRIPT = """\
read_verilog -sv {source}
hierarchy -check -top {top}
design -save read
synth_xilinx -flatten -noiopad -top {top}
tee -o {folder}/fpga.txt stat
tee -o {folder}/fpga_depth.txt ltp -noff
design -load read
synth -flatten -top {top}
abc -g AND,OR,XOR,MUX
opt_clean
tee -o {folder}/gates.txt stat
tee -o {folder}/gates_depth.txt ltp -noff
"""


class Cost(NamedTuple):
    """What a module costs.

    Attributes:
        luts: Lookup tables of a Xilinx FPGA of the seventh series.
        carries: Its carry cells, of four bits each.
        registers: Flip-flops.
        depth: Cells in a row.
        gates: Gates with two inputs, and multiplexers.
        gate_depth: Gates in a row.
    """

    luts: int
    carries: int
    registers: int
    depth: int
    gates: int
    gate_depth: int


def cost(unit: Unit, stages: int = 0, generator: bool = False) -> Cost:
    """Synthesize a unit with Yosys and count its cells.

    Args:
        unit: The unit.
        stages: See `emit`.
        generator: See `emit`.

    Raises:
        FileNotFoundError: If Yosys is not installed.
        RuntimeError: If it fails.

    Example:
        >>> import shutil
        >>> from qsim.silicon import Unit, cost
        >>> shutil.which("yosys") is None or cost(Unit("e2m1", "encode", "toward_zero", source="bf16")).luts < 50
        True
    """
    return cost_of(systemverilog.module(routine(unit), stages, generator), unit.name)


def cost_of(source: str, top: str) -> Cost:
    """Synthesize SystemVerilog with Yosys and count its cells.

    Args:
        source: The text.
        top: The name of the module.
    """
    yosys = shutil.which("yosys")
    if yosys is None:
        raise FileNotFoundError("qsim cost needs Yosys, which is not installed: `apt install yosys`, or https://yosyshq.net")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "unit.sv").write_text(source)
        (folder / "script.ys").write_text(_SCRIPT.format(source=folder / "unit.sv", top=top, folder=folder))
        done = subprocess.run([yosys, "-q", "-s", str(folder / "script.ys")], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"Yosys cannot synthesize {top}: {done.stderr.strip()}")
        fpga, gates = ((folder / f"{kind}.txt").read_text() for kind in ("fpga", "gates"))
        depth, gate_depth = (_depth((folder / f"{kind}_depth.txt").read_text()) for kind in ("fpga", "gates"))
    return Cost(
        luts=_count(fpga, r"LUT\d|INV"),
        carries=_count(fpga, r"CARRY4"),
        registers=_count(fpga, r"FD\w+"),
        depth=depth,
        gates=_count(gates, r"\$_(?:AND|OR|XOR|MUX|NOT)_"),
        gate_depth=gate_depth,
    )


def _count(statistics: str, cells: str) -> int:
    return sum(int(count) for count in re.findall(rf"^\s+(?:{cells})\s+(\d+)", statistics, re.MULTILINE))


def _depth(text: str) -> int:
    longest = re.search(r"length=(\d+)", text)
    return int(longest[1]) if longest else 0
