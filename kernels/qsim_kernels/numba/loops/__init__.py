"""The loops that Numba compiles: functions of 64-bit integers, most of them addresses. Only `building` imports these modules."""
