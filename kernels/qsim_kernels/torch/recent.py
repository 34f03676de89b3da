"""Results that threads share, up to a number of them."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Recent(Generic[K, T]):
    """The last results by key: of more than `size`, the first ones are dropped.

    Args:
        size: The most results to keep.

    Example:
        >>> recent: Recent[str, str] = Recent(2)
        >>> for key in "abc":
        ...     recent.put(key, key.upper())
        >>> recent.get("a"), recent.get("c"), len(recent)
        (None, 'C', 2)
    """

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, Lock()
        self._results: dict[K, T] = {}

    def __len__(self) -> int:
        return len(self._results)

    def get(self, key: K) -> T | None:
        """The result of a key, if it is kept."""
        return self._results.get(key)

    def put(self, key: K, result: T) -> None:
        """Keep a result."""
        with self._lock:
            self._results[key] = result
            while len(self._results) > self._size:
                del self._results[next(iter(self._results))]

    def items(self) -> list[tuple[K, T]]:
        """All keys with their results."""
        with self._lock:
            return [*self._results.items()]
