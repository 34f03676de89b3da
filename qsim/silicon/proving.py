"""Proof that a module gives the right result for every input and all random bits, by Yosys and its SAT solver."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import torch

from qsim.silicon.checking import Comparison, check
from qsim.silicon.circuits import Circuit
from qsim.silicon.graphs import defined, routine
from qsim.silicon.printers import systemverilog
from qsim.silicon.synthesis import run_yosys
from qsim.silicon.vectors import Vectors

_PROOF = """\
read_verilog -sv {folder}/defined.sv
read_verilog -sv {folder}/module.sv
proc
miter -equiv -flatten -make_outputs {defined} {module} both
hierarchy -top both
flatten
opt -full
tee -o {folder}/proof.txt sat -prove trigger 0 -show-inputs -show-outputs both
"""


def prove(circuit: Circuit, module: str | None = None, limit: float | None = None) -> Comparison | None:
    """Prove that a module computes a circuit, for every input and all random bits.

    It is compared with the definition of rounding that every part of qsim shares, which rounds first and then encodes. What `emit` writes
    does both in one step.

    Args:
        circuit: The circuit.
        module: SystemVerilog whose last module has the ports of the circuit: `x`, `random` with stochastic rounding, and `y`. By default
            what `emit` writes.
        limit: The seconds that Yosys may take; no limit by default.

    Returns:
        Nothing if it is proven, otherwise the result that is wrong, with the step of the definition that it concerns.

    Raises:
        ValueError: If the text has no module.
        FileNotFoundError: If Yosys is not installed.
        RuntimeError: If Yosys cannot compare them, because ports differ, or decides nothing.
        TimeoutError: If it takes longer than `limit`.

    Example:
        >>> from qsim.silicon import Circuit, prove
        >>> prove(Circuit("e4m3", "encode"))  # doctest: +SKIP
    """
    text = systemverilog.module(routine(circuit)) if module is None else module
    names = re.findall(r"^\s*module\s+(\w+)", text, flags=re.MULTILINE)
    if not names:
        raise ValueError("module must be SystemVerilog with a module, got a text without one")
    reference = defined(circuit)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "defined.sv").write_text(systemverilog.module(reference))
        (folder / "module.sv").write_text(text)
        run_yosys(_PROOF.format(folder=folder, defined=reference.name, module=names[-1]), folder, f"prove {circuit.name}", limit)
        proof = (folder / "proof.txt").read_text()
    if "no model found: SUCCESS" in proof:
        return None
    x, random, y = (_signal(proof, signal) for signal in ("in_x", "in_random", "gate_y"))
    found = check(Vectors(circuit, torch.tensor([x]), torch.tensor([random]), torch.tensor([y])))
    if found.first is None:
        raise RuntimeError(f"prove {circuit.name}: Yosys neither proved the module nor found a wrong result:\n{proof.strip()[-500:]}")
    return found


def _signal(proof: str, name: str) -> int:
    """The value of a signal in Yosys's counterexample; 0 if there is none of this name. Bits that do not matter are 0."""
    found = re.search(rf"^\s*\\{name}\s.*\s([01x]+)\s*$", proof, flags=re.MULTILINE)
    return int(found[1].replace("x", "0"), 2) if found else 0
