"""Traces in folders read, write and delete files of their own folder only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import qsim
from qsim.diagnostics import Trace, trace
from qsim.diagnostics.traces.stores import TensorFolder


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "..", "a/b", "C:b", "x" * 5000, "a\0", "\ud800", "\n"])
def test_an_index_names_no_file_elsewhere(name: str, tmp_path: Path) -> None:
    trace(nn.Linear(2, 2), torch.ones(1, 2), folder=tmp_path / "trace")
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    index = json.loads((tmp_path / "trace" / "trace.json").read_text())
    index["files"][next(iter(index["files"]))] = name
    (tmp_path / "trace" / "trace.json").write_text(json.dumps(index))
    with pytest.raises(qsim.FileError, match=r"Trace.load: .*trace.json is malformed: it names .*, which is not a file in its folder"):
        Trace.load(tmp_path / "trace")
    assert (tmp_path / "secret.safetensors").read_bytes() == b"secret"


def test_a_link_in_a_folder_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    found = trace(nn.Linear(2, 2), torch.ones(1, 2), folder=tmp_path / "trace")
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    name = next(iter(found.tensors))
    index = json.loads((tmp_path / "trace" / "trace.json").read_text())
    file = tmp_path / "trace" / index["files"][name]
    for change in (lambda tensors: tensors.__setitem__(name, torch.ones(3)), lambda tensors: tensors.__delitem__(name)):
        file.unlink()
        file.symlink_to(tmp_path / "secret.safetensors")
        change(Trace.load(tmp_path / "trace").tensors)
        assert not file.is_symlink()
        assert (tmp_path / "secret.safetensors").read_bytes() == b"secret"


def test_a_new_tensor_takes_no_file_of_another(tmp_path: Path) -> None:
    tensors = TensorFolder(tmp_path)
    for number, name in enumerate("ab"):
        tensors[name] = torch.tensor(number)
    tensors.describe({})
    for is_read in (False, True):
        one = TensorFolder(tmp_path) if is_read else tensors
        del one["a"]
        one["c"] = torch.tensor(2)
        assert (one["b"], one["c"]) == (1, 2)
        one["a"] = torch.tensor(0)
        assert sorted(one) == ["a", "b", "c"]
        del one["c"]
        one.describe({})
