"""Kernels compile for a GPU that is not there, in all their kinds: Triton's interpreter accepts more than its compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

#: The registers that a thread can have, and the accumulators whose kernels use all of them.
MOST_REGISTERS = 255
FULL = {
    "Aligned(8, 24, 'fp16', rounding='nearest') of fp16",
    "Rounded('fp16', chunk=64, order='kahan', rounding='stochastic') of bf16",
    "Promoted(Rounded('fp16', chunk=16, order='kahan', rounding='stochastic'), 64) of tf32",
}
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@pytest.mark.slow
@pytest.mark.skipif(not os.access(TOOL, os.X_OK), reason="this Triton cannot compile for NVIDIA's GPUs")
def test_all_kinds_of_kernels_compile() -> None:
    """In a process of its own, where Triton does not interpret, and each within the registers of a thread."""
    settings = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "support.compiled_offline", "--json"]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {kernel for kernels in found.values() for kernel in kernels} >= {
        "quantize_kernel",
        "column_pairs_kernel",
        "encode_kernel",
        "decode_kernel",
        "tiles_kernel",
        "best_kernel",
        "pairs_kernel",
        "both_ways_kernel",
        "codes_both_ways_kernel",
        "turned_kernel",
        "whole_scale_kernel",
        "turned_scale_kernel",
        "turned_amaxes_kernel",
        "hadamard_kernel",
        "quantize_and_sum_kernel",
        "rescale_kernel",
        "update_kernel",
        "prepare_kernel",
        "planes_kernel",
        "aligned_kernel",
        "rounded_kernel",
        "chunked_kernel",
    }
    registers = {name: max(count for forms in kernels.values() for _, count in forms) for name, kernels in found.items() if kernels}
    assert {name for name, count in registers.items() if not 0 < count < MOST_REGISTERS} <= FULL
