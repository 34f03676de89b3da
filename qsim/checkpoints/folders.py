"""Folders that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: The file with the configuration of the model: everything that qsim knows about it except its tensors.
DESCRIPTION = "qsim.json"


@contextmanager
def whole_folder(action: str, folder: str | os.PathLike[str], *, overwrite: bool) -> Iterator[Path]:
    """Write a folder under another name, which ends in `.incomplete`, and rename it once everything in it is written.

    Args:
        action: The function that writes, for errors.
        folder: The folder. Its parents are created.
        overwrite: Replace a folder that exists.

    Raises:
        FileExistsError: If the folder exists and is not empty.
    """
    target = Path(folder)
    check_free(action, target, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.incomplete")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        yield unfinished
        _replace(target, unfinished)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_free(action: str, folder: Path, *, overwrite: bool) -> None:
    """Raise an error if something is in a folder that may not be replaced."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{action}: {folder} is a file, and a folder is written")
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{action}: {folder} is not empty; overwrite=True replaces it")


def _replace(folder: Path, by: Path) -> None:
    """Put a folder where there may be another, which is moved away first: no system replaces a folder with content in one step."""
    former = folder.with_name(f"{folder.name}.{os.getpid()}.replaced")
    if folder.exists():
        folder.rename(former)
    by.rename(folder)
    shutil.rmtree(former, ignore_errors=True)
