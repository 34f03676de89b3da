"""A lock between processes, which ends with the process that holds it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: processes do the same work at once
    fcntl = None

#: Seconds to wait for another process: one that was stopped must not stop all others.
PATIENCE = 60.0


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes out that use the same file, for at most `PATIENCE` seconds, and where files can be locked at all."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = path.open("w")
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
