"""A lock between processes, which ends with the process that holds it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qsim_kernels.numba.cache import NOT_A_LINK

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
