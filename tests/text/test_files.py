"""Files that are written whole: nothing else is touched, and nothing is left over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qsim.text.files import write_whole


def test_a_link_with_the_name_of_a_file_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for name in ("results.jsonl", "results.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "thesis.tex")
    write_whole(tmp_path / "results.jsonl", "one\n")
    assert (tmp_path / "results.jsonl").read_text() == "one\n"
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.jsonl", "results.tmp", "thesis.tex"]


def test_a_full_disk_leaves_the_former_file_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "results.jsonl"
    path.write_text("before\n")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "after\n")
    assert path.read_text() == "before\n"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_written_directly(tmp_path: Path) -> None:
    write_whole(os.devnull, "lost")
    assert not Path(os.devnull).is_file()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert list(tmp_path.iterdir()) == [pipe]
