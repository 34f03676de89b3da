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

#: The file with the configuration of the model: everything that qsim knows about it except its tensors, and the names of all files.
DESCRIPTION = "qsim.json"

_COMMITTED, _INCOMPLETE = ".qsim-committed", ".incomplete"
#: The files of descriptions that do not name them, of earlier versions.
_FORMER = re.compile(r"qsim\.json|(generation_)?config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")


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
    check_free(action, target, overwrite=overwrite)
    complete(target)
    is_new = not target.exists()
    target.parent.mkdir(parents=True, exist_ok=True)
    draft_name = f".qsim-{uuid.uuid4().hex[:8]}{_INCOMPLETE}"
    draft = target.with_name(draft_name) if is_new else target / draft_name
    draft.mkdir()
    try:
        yield draft
        _write_through(draft)
        if is_new:
            _rename(action, draft, target)
        else:
            check_free(action, target, overwrite=overwrite)
            _rename(action, draft, target / _COMMITTED)
            complete(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_description(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the description of a draft, which names all files that are in it by now."""
    files = sorted({DESCRIPTION, *(path.name for path in folder.iterdir())})
    (folder / DESCRIPTION).write_text(json.dumps({**facts, "files": files}, indent=2) + "\n", encoding="utf-8")


def check_free(action: str, folder: Path, *, overwrite: bool) -> None:
    """Raise an error if something is in a folder that may not be replaced: what qsim did not write, and without `overwrite` the rest."""
    if not overwrite:
        check_empty(action, folder, "; overwrite=True replaces a checkpoint")
    present = _contents(action, folder)
    own = {_COMMITTED, *_files_of(folder), *_files_of(folder / _COMMITTED)} if present else set()
    others = [name for name in present if name not in own]
    if others:
        named = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise FileExistsError(f"{action}: {folder} holds what qsim did not write there, which stays: {named}; give another folder")


def check_empty(action: str, folder: Path, remedy: str = "") -> None:
    """Raise an error, which ends in a remedy, if something is in a folder."""
    if _contents(action, folder):
        raise FileExistsError(f"{action}: {folder} is not empty{remedy}")


def _contents(action: str, folder: Path) -> list[str]:
    """The names in a folder, without drafts; none if there is no folder."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{action}: {folder} is a file, and a folder is written")
    return sorted(path.name for path in folder.iterdir() if not _is_draft(path)) if folder.is_dir() else []


def complete(folder: Path) -> None:
    """Move files to their places that a process, perhaps interrupted, has written completely, and delete those that they replace."""
    committed = folder / _COMMITTED
    if not committed.is_dir():
        return
    former, new = _files_of(folder), _files_of(committed) or _files_of(folder)
    for name in former - new:
        with suppress(FileNotFoundError):
            (folder / name).unlink()
    # The description is last: as long as it is the former one, it names the files to delete.
    for name in sorted(new, key=lambda name: name == DESCRIPTION):
        with suppress(FileNotFoundError):  # moved already, perhaps by another process
            os.replace(committed / name, folder / name)
    with suppress(OSError):  # another process may have removed it, or have written more
        committed.rmdir()


def _files_of(folder: Path) -> set[str]:
    """The names of the files that a folder's description says qsim wrote; none if there is no description."""
    path = folder / DESCRIPTION
    if not path.is_file():
        return set()
    try:
        files = read_json("overwrite", path, {"conversion": {}, "files?": [str]}).get("files")
        present = [each.name for each in folder.iterdir() if _FORMER.fullmatch(each.name)] if files is None else files
        return {name_in_folder("overwrite", path, name) for name in present}
    except FileError:
        return set()


def _is_draft(path: Path) -> bool:
    """Whether a folder is what a process has not completed."""
    return path.name.startswith(".qsim-") and path.name.endswith(_INCOMPLETE)


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
