"""The folder that machine code is kept in, its files, loaded only if the user alone can have written them, and their locks."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: processes do the same work at once
    fcntl = None

_DIGEST = hashlib.sha256().digest_size
#: A link is not followed: it could lead to another file of the user's, to be read or changed.
NOT_A_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def private_folder(name: str) -> Path | None:
    """A folder of the user's cache that only the user can write, made if it does not exist; None, with a warning, if there is none."""
    home = user_cache()
    path = Path() if home is None else home / "qsim" / name
    reason = "there is no home folder; XDG_CACHE_HOME names a folder to use" if home is None else _obstacle(path.parent) or _obstacle(path)
    if not reason:
        return path
    warnings.warn(f"every process compiles its CPU loops again, because {reason}", RuntimeWarning, stacklevel=2)
    return None


def _obstacle(path: Path) -> str:
    """Why a folder, which is made if it does not exist, is not one that only the user can write; empty if it is one."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        facts = path.lstat()
    except OSError as error:
        return f"{path} cannot be made: {error.strerror}"
    if not stat.S_ISDIR(facts.st_mode):
        return f"{path} is not a folder"
    return "" if _is_private(facts) else f"{path} belongs to another user, or others can write it; remove it, or take their permission away"


def user_cache() -> Path | None:
    """The folder in which programs of the user keep what they can compute again; relative paths do not count, as XDG's standard says."""
    home = Path(os.path.expanduser("~"))
    usual = {"darwin": home / "Library" / "Caches", "win32": Path(os.environ.get("LOCALAPPDATA", ""))}.get(sys.platform, home / ".cache")
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return next((path for path in (named, usual) if path.is_absolute()), None)


def _is_private(facts: os.stat_result) -> bool:
    """Whether a file or folder belongs to the user, and no other user can write it; Windows keeps its users' folders apart itself."""
    return not hasattr(os, "geteuid") or (facts.st_uid == os.geteuid() and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def read(path: Path) -> bytes | None:
    """The machine code in a file, if it is there, whole, and written by the user."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | NOT_A_LINK), "rb") as file:
            content = file.read() if _is_private(os.fstat(file.fileno())) else b""
    except OSError:
        return None
    digest, code = content[:_DIGEST], content[_DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def write(path: Path, code: bytes) -> None:
    """Keep machine code for later processes, if the folder can be written; a process killed here leaves no partial file under this name."""
    with suppress(OSError):
        handle, draft = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)  # a full disk, for example
            raise


#: Seconds to wait for another process: one that was stopped must not stop all others.
PATIENCE = 60.0


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes out that use the same file, for at most `PATIENCE` seconds, and where files can be locked at all."""
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | NOT_A_LINK, 0o600), "r+b")
    except OSError:
        yield
        return
    with file:
        end = time.monotonic() + PATIENCE
        while not _taken(file.fileno()) and time.monotonic() < end:
            time.sleep(0.05)
        yield


def _taken(file: int) -> bool:
    """Whether the file is locked now. A forked child does not inherit the lock, and the end of a process releases it."""
    if fcntl is None:
        return True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
