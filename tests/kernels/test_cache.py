"""Attacks on the folder of machine code: nothing is loaded that another user may have written, and no file of the user's is changed."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pwd: Any = pytest.importorskip("pwd", reason="Windows keeps its users' folders apart itself")
native: Any = pytest.importorskip("qsim_kernels.numba.native", reason="needs numba")
from qsim_kernels.numba import building, cache  # noqa: E402 (needs numba)

NAME, OURS, THEIRS = ("scales", "fit", "qsim_scales_fit"), b"compiled here", b"planted"
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
#: Other users must be able to read the library to run it.
READABLE = pytest.mark.skipif(
    not all(folder.stat().st_mode & 0o001 for folder in (*Path(__file__).parents, *Path(sys.executable).parents)),
    reason="other users cannot read this clone",
)
#: A user that is not this one.
OTHER = 54321


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty home folder; what is compiled takes no time."""
    monkeypatch.setattr(building, "machine_code", lambda *_: OURS)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir(mode=0o755)
    native.folder.cache_clear()
    yield tmp_path / "home"
    native.folder.cache_clear()


def folder() -> Path:
    """The cache folder, not yet made by this process."""
    found = native.folder()
    assert isinstance(found, Path)
    native.folder.cache_clear()
    return found


def plant(at: Path) -> Path:
    """Write a file that would be loaded if it were the user's own."""
    at.mkdir(parents=True, exist_ok=True)
    file = at / "scales.fit.o"
    file.write_bytes(hashlib.sha256(THEIRS).digest() + THEIRS)
    return file


def refused(reason: str) -> None:
    """Check that the folder is not used, and why."""
    with pytest.warns(RuntimeWarning, match=f"every process compiles its CPU loops again, because .*{reason}"):
        assert native._machine_code(*NAME) == OURS


def test_what_the_user_wrote_is_loaded() -> None:
    plant(folder())
    assert native._machine_code(*NAME) == THEIRS


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
@pytest.mark.parametrize("level", [0, 1])
def test_folders_that_others_can_write(mode: int, level: int) -> None:
    plant(folder())
    chosen = folder() if level == 0 else folder().parent
    chosen.chmod(mode)
    refused("others can write it")


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_files_that_others_can_write(mode: int) -> None:
    plant(folder()).chmod(mode)
    assert native._machine_code(*NAME) == OURS


@ROOT
@pytest.mark.parametrize("level", [0, 1])
def test_folders_of_another_user(level: int) -> None:
    plant(folder())
    os.chown(folder() if level == 0 else folder().parent, OTHER, OTHER)
    refused("belongs to another user")


@ROOT
def test_files_of_another_user() -> None:
    os.chown(plant(folder()), OTHER, OTHER)
    assert native._machine_code(*NAME) == OURS


@pytest.mark.parametrize("level", [0, 1])
def test_links_are_not_folders(tmp_path: Path, level: int) -> None:
    plant(folder())
    theirs = folder() if level == 0 else folder().parent
    theirs.rename(tmp_path / "elsewhere")
    theirs.symlink_to(tmp_path / "elsewhere")
    refused("is not a folder")


def test_links_are_not_files(tmp_path: Path) -> None:
    (folder() / "scales.fit.o").symlink_to(plant(tmp_path / "elsewhere"))
    assert native._machine_code(*NAME) == OURS


@pytest.mark.parametrize("linked", [True, False])
def test_a_lock_changes_no_file(tmp_path: Path, linked: bool) -> None:
    kept, lock = tmp_path / "kept", folder() / "scales.fit.lock"
    kept.write_text("mine")
    if linked:
        lock.symlink_to(kept)
    else:
        lock.hardlink_to(kept)
    with cache.locked(lock):
        assert native._machine_code(*NAME) == OURS
    assert kept.read_text() == "mine"


def test_no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Usual in containers: HOME is not set, and the user has no entry among the system's users, so that "~" stays as it is.
    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    plant(tmp_path / "~" / ".cache" / "qsim" / "0")
    assert cache.user_cache() is None
    refused("there is no home folder; XDG_CACHE_HOME names a folder to use")
    assert not list(tmp_path.glob("*/.cache/qsim/*/*.lock"))


@pytest.mark.parametrize("named", ["cache", "./cache", "~/cache", ""])
def test_relative_cache_folders_do_not_count(named: str, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    monkeypatch.chdir(tmp_path)
    assert native._machine_code(*NAME) == OURS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]
    assert cache.user_cache() == home / (".cache" if sys.platform != "darwin" else "Library/Caches")


def test_a_home_that_is_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    refused("cannot be made: Not a directory")


def as_other_user(refusal: str) -> None:
    """Check in a process of another user, if this one is root's, that the folder is not used, and why."""

    def run() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
        refused(refusal)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder that other users can read."""
    with TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        monkeypatch.setenv("HOME", place)
        yield Path(place)


@READABLE
def test_a_home_that_cannot_be_written(public: Path) -> None:
    public.chmod(0o555)
    as_other_user("cannot be made: Permission denied")
    assert not list(public.iterdir())


@READABLE
@ROOT
def test_a_user_without_account_and_home(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = plant(public / "~" / ".cache" / "qsim" / folder().name)
    for path in (public, *public.rglob("*")):
        os.chown(path, OTHER, OTHER)
    monkeypatch.chdir(public)
    monkeypatch.delenv("HOME")
    before = sorted(public.rglob("*"))
    as_other_user("there is no home folder; XDG_CACHE_HOME names a folder to use")
    assert sorted(public.rglob("*")) == before
    assert file.read_bytes().endswith(THEIRS)


@READABLE
@ROOT
def test_the_home_of_root_that_another_user_can_read(public: Path) -> None:
    plant(folder())
    for path in public.rglob("*"):
        path.chmod(0o755)
    as_other_user("belongs to another user")


def test_folders_are_made_for_the_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        made = folder()
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (made, made.parent)] == [0o700, 0o700]
    native._machine_code(*NAME)
    assert [path.stat().st_mode & 0o777 for path in sorted(made.iterdir())] == [0o600, 0o600]


def test_a_full_disk_leaves_no_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(draft: str, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    place = tmp_path / "cache"
    place.mkdir()
    cache.write(place / "scales.o", b"code")
    assert list(place.iterdir()) == []
