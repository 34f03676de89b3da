"""Folders of checkpoints: each is written whole or not at all, whenever a process stops, and only files of qsim are ever replaced.

A folder that does not exist yet is written under another name and renamed. One that exists stays where it is, because it may be the current
folder, or a link to another disk: the new files are written to a folder in it, which is renamed to `_COMMITTED` once they are complete.
From then on they count; they are moved to their places, and what an interrupted process has not moved the next one moves.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qsim.text.files import FileError, name_in_folder, read_json

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: processes that complete a folder at once do the same, and drafts of killed ones stay
    fcntl = None

#: The file with the configuration of the model: everything that qsim knows about it except its tensors, and the names of all files.
DESCRIPTION = "qsim.json"

_COMMITTED = ".qsim-committed"
_DRAFT = re.compile(r"\.qsim-[0-9a-f]{32}\.incomplete")
#: The files of descriptions that do not name them, of earlier versions: those of `save`, and what `export` wrote in addition.
_SAVED = re.compile(r"qsim\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
_EXPORTED = re.compile(rf"{_SAVED.pattern}|(generation_)?config\.json")


@contextmanager
def whole_folder(action: str, folder: str | os.PathLike[str], *, overwrite: bool) -> Iterator[Path]:
    """Write the files of a folder to a draft, whose name ends in `.incomplete`, and put them in place once all of them are written.

    Args:
        action: The function that writes, for errors.
        folder: The folder; a link is followed. Its parents are created.
        overwrite: Replace the files that qsim wrote to a folder that exists.

    Raises:
        FileExistsError: If the folder has files that may not be replaced, or another process is writing it.
    """
    target = resolved(action, folder)
    complete(target)
    check_free(action, target, overwrite=overwrite)
    is_new = not target.exists()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _draft(target.parent if is_new else target) as draft:
        yield draft
        _write_through(draft)
        if not is_new:
            check_free(action, target, overwrite=overwrite)
        _rename(action, draft, target if is_new else target / _COMMITTED)
        complete(target)


def write_description(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the description of a draft, which names all files that are in it by now."""
    files = sorted({DESCRIPTION, *(path.name for path in folder.iterdir())})
    (folder / DESCRIPTION).write_text(json.dumps({**facts, "files": files}, indent=2) + "\n", encoding="utf-8")


def check_free(action: str, folder: Path, *, overwrite: bool) -> None:
    """Raise an error if something is in a folder that may not be replaced: what qsim did not write, and without `overwrite` the rest."""
    if not overwrite:
        check_empty(action, folder, "; overwrite=True replaces a checkpoint")
    present = _contents(action, folder)
    # In this order: a file that another process moves meanwhile is in the second description if it is no longer in the first.
    own = {_COMMITTED, *_files_of(folder / _COMMITTED), *_files_of(folder)} if present else set()
    # All are files or links, except for the folder of what is not moved yet.
    others = [path.name for path in present if path.name not in own or _is_real_folder(path) != (path.name == _COMMITTED)]
    if others:
        named = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise FileExistsError(f"{action}: {folder} holds what qsim did not write there, which stays: {named}; give another folder")


def check_empty(action: str, folder: Path, remedy: str = "") -> None:
    """Raise an error, which ends in a remedy, if something is in a folder."""
    if _contents(action, folder):
        raise FileExistsError(f"{action}: {folder} is not empty{remedy}")


def complete(folder: Path) -> None:
    """Move files to their places that a process, perhaps interrupted, has written completely, and delete those that they replace."""
    committed = folder / _COMMITTED
    if not _is_real_folder(committed):  # a link could lead to another checkpoint, whose files would be moved here
        return
    with _locked(committed / DESCRIPTION) as is_there:
        if is_there:
            _move(committed, folder)
    with suppress(OSError):  # another process may have removed it, or have written more
        committed.rmdir()


def _move(committed: Path, folder: Path) -> None:
    """Replace the files of a folder. The description comes last: until then it is the former one, which names the files to delete."""
    former, new = _files_of(folder), _files_of(committed)
    for name in former - new:
        with suppress(FileNotFoundError):
            (folder / name).unlink()
    for name in sorted(new, key=lambda name: name == DESCRIPTION):
        with suppress(FileNotFoundError):  # moved by a process that was interrupted
            os.replace(committed / name, folder / name)


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Keep other processes from moving a file, and report whether it is still there; the lock of a process that is killed ends."""
    if fcntl is None:
        yield path.exists()
        return
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        yield False
        return
    with file:
        _lock(file.fileno(), fcntl.LOCK_EX)
        yield path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


def _lock(descriptor: int, operation: int) -> bool:
    """Lock a file or folder, and report success; some network file systems have no locks, or none of folders."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError:
        return False
    return True


@contextmanager
def _draft(place: Path) -> Iterator[Path]:
    """A new folder for files that are not complete yet, locked; drafts of processes that were killed are deleted."""
    with suppress(OSError):
        _sweep(place)
    draft = place / f".qsim-{uuid.uuid4().hex}.incomplete"
    draft.mkdir()
    descriptor = None if fcntl is None else os.open(draft, os.O_RDONLY)
    try:
        if descriptor is not None:
            _lock(descriptor, fcntl.LOCK_EX)
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def _sweep(place: Path) -> None:
    """Delete drafts that no process has locked. An empty one may be new, and not locked yet."""
    for draft in () if fcntl is None else filter(_is_draft, place.iterdir()):
        descriptor = os.open(draft, os.O_RDONLY)
        try:
            if _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB) and any(draft.iterdir()):
                shutil.rmtree(draft, ignore_errors=True)
        finally:
            os.close(descriptor)


def _contents(action: str, folder: Path) -> list[Path]:
    """The contents of a folder, sorted, without drafts; nothing if there is no folder."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{action}: {folder} is a file, and a folder is written")
    return sorted(path for path in folder.iterdir() if not _is_draft(path)) if folder.is_dir() else []


def _files_of(folder: Path) -> set[str]:
    """The names of the files that a folder's description says qsim wrote; none if there is no description."""
    path = folder / DESCRIPTION
    if not path.is_file():
        return set()
    try:
        facts = read_json("overwrite", path, {"conversion": {}, "files?": [str]})
        former = _EXPORTED if "layout" in facts else _SAVED
        names = facts["files"] if "files" in facts else [each.name for each in folder.iterdir() if former.fullmatch(each.name)]
        return {name_in_folder("overwrite", path, name) for name in names}
    except (FileError, FileNotFoundError):  # not of qsim, or moved meanwhile
        return set()


def _is_draft(path: Path) -> bool:
    """Whether a folder is what a process has not completed."""
    return _DRAFT.fullmatch(path.name) is not None and _is_real_folder(path)


def _is_real_folder(path: Path) -> bool:
    """Whether a path is a folder, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def resolved(action: str, folder: str | os.PathLike[str]) -> Path:
    """The absolute path of a folder, without links."""
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"{action}: folder must be a path, got {folder!r}")
    return Path(folder).resolve()


def _rename(action: str, draft: Path, target: Path) -> None:
    """Rename a draft; raise an error if another process was faster, which no system replaces."""
    try:
        draft.rename(target)
    except OSError as error:
        if not target.exists():
            raise
        raise FileExistsError(f"{action}: another process has written {target} meanwhile, or is writing it") from error


def _write_through(folder: Path) -> None:
    """Have the files of a draft on disk before they count."""
    for path in folder.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
