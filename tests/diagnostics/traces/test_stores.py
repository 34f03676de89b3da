"""Traces in folders read, write and delete files of their own folder only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import qsim
from qsim.diagnostics import Trace, trace


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "..", "a/b", "x" * 5000])
def test_an_index_names_no_file_elsewhere(name: str, tmp_path: Path) -> None:
    trace(nn.Linear(2, 2), torch.ones(1, 2), folder=tmp_path / "trace")
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    index = json.loads((tmp_path / "trace" / "trace.json").read_text())
    index["files"][next(iter(index["files"]))] = name
    (tmp_path / "trace" / "trace.json").write_text(json.dumps(index))
    with pytest.raises(qsim.FileError, match=r"Trace.load: .*trace.json is malformed: it names .*, which is not a file in its folder"):
        Trace.load(tmp_path / "trace")
    assert (tmp_path / "secret.safetensors").read_bytes() == b"secret"
