"""The bits of every operator, compared with those that were recorded once: on every device, and whatever implementation a device has.

To record new cases: `PYTHONPATH=kernels:tests python tests/kernels/test_digests.py`, which never changes what is recorded already.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support.digests import cases, digest

RECORDED: dict[str, str] = json.loads((Path(__file__).parent / "digests.json").read_text())
_CASES = cases()
_PARTS = 8


@pytest.mark.sampled(12)
@pytest.mark.filterwarnings("ignore:betas")
@pytest.mark.parametrize("part", range(_PARTS))
def test_no_bit_has_changed_since_it_was_recorded(part: int, device: torch.device) -> None:
    names = list(_CASES)[part::_PARTS]
    assert {name: digest(_CASES[name](device)) for name in names} == {name: RECORDED[name] for name in names}


def test_nothing_else_is_recorded() -> None:
    assert RECORDED.keys() == _CASES.keys()


if __name__ == "__main__":
    recorded = {name: RECORDED.get(name) or digest(results(torch.device("cpu"))) for name, results in _CASES.items()}
    (Path(__file__).parent / "digests.json").write_text(json.dumps(recorded, indent=0) + "\n")
