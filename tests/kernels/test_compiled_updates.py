"""Tests that compiled CPU loops update parameters like plain torch, bit for bit."""

from __future__ import annotations

import pytest
import torch

from qsim_kernels import torch as reference
from support.comparing import same_bits
from support.update_cases import CASES, UpdateCase, run

compiled = pytest.importorskip("qsim_kernels.numba.updates", reason="needs numba")
LARGE = ((300, 900), (7,))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", [*CASES, *(UpdateCase(name, sizes=LARGE) for name in ("AdamW", "AMSGrad"))], ids=str)
def test_loops_do_what_the_reference_does(case: UpdateCase) -> None:
    due, found = (run(update, case, torch.device("cpu")) for update in (reference.update, compiled.update))
    assert len(due) == len(found)
    assert all(map(same_bits, due, found))
