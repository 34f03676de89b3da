"""Numba with everything that it imports when it first compiles a function: half a second for every process that does so by itself."""

from __future__ import annotations

import numba

numba.njit("int64(int64)")(lambda x: x)
