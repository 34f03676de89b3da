"""Numbers of each type, and operations that Numba lacks.

They are memory at an address, room on the stack, the bits of a float as an integer, and calls of an address.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from types import MappingProxyType
from typing import Any, get_type_hints

import numba
import numpy as np
from llvmlite import ir
from numba import types as numba_types
from numba.extending import intrinsic

from qsim_kernels.private import NUMBA_OPTIONS, cgutils

types: Any = numba_types
_numpy: Any = np
i16, i32, i64, u32, u64 = _numpy.int16, _numpy.int32, _numpy.int64, _numpy.uint32, _numpy.uint64
f32, f64 = _numpy.float32, _numpy.float64
#: The options of functions that loops are made of; see `building.OPTIONS`.
part = numba.njit(**NUMBA_OPTIONS, no_cpython_wrapper=True, no_cfunc_wrapper=True)
#: The same for functions that are copied into their callers before types are known.
inlined = numba.njit(inline="always", **NUMBA_OPTIONS)


def _memory(kind: Any) -> tuple[Any, Any]:
    """A function that gives the memory at an address as elements of a type, and one that makes room for a constant number of them."""
    pointer = types.CPointer(kind)

    def at(context: Any, address: Any) -> Any:
        """The elements at an address; indices are not checked, and never count from the end."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(pointer))

        return pointer(types.int64), generate

    def room(context: Any, count: Any) -> Any:
        """Reserve room on the stack, for a number of elements that is a constant of the module."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = cgutils.alloca_once(builder, context.get_data_type(kind), size=number)
            place.align = 64
            return builder.bitcast(place, context.get_value_type(pointer))

        number = getattr(count, "literal_value", None)
        return None if number is None else (pointer(count), generate)

    return intrinsic(at), intrinsic(prefer_literal=True)(room)


shorts, room_for_shorts = _memory(types.int16)
halves, _ = _memory(types.uint16)
bytes_, _ = _memory(types.uint8)
ints, room_for_ints = _memory(types.int32)
words, room_for_words = _memory(types.uint32)
longs, room_for_longs = _memory(types.int64)
wide_words, room_for_wide_words = _memory(types.uint64)
floats, room_for_floats = _memory(types.float32)
doubles, room_for_doubles = _memory(types.float64)


@intrinsic
def address_of(context: Any, place: Any) -> Any:
    """The address of elements."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], ir.IntType(64))

    return types.int64(place), generate


@intrinsic(prefer_literal=True)
def numbers(context: Any, address: Any, count: Any) -> Any:
    """The first numbers of 64 bits at an address; their count is a constant."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(types.int64)))
        found = [builder.load(cgutils.gep_inbounds(builder, place, i)) for i in range(len(signature.return_type))]
        return context.make_tuple(builder, signature.return_type, found)

    size = getattr(count, "literal_value", None)
    return None if size is None else (types.UniTuple(types.int64, size)(types.int64, count), generate)


@intrinsic(prefer_literal=True)
def last_of(context: Any, key: Any, firsts: Any, results: Any) -> Any:
    """The result of the last place whose first number is not above a key: one comparison and one choice for each, without branches."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        key, *pair = arguments
        firsts, results = ([builder.extract_value(given, i) for i in range(len(signature.args[1]))] for given in pair)
        found = builder.trunc(results[0], key.type)
        for first, result in zip(firsts[1:], results[1:], strict=True):
            is_below = builder.icmp_signed("<", key, builder.trunc(first, key.type))
            found = builder.select(is_below, found, builder.trunc(result, key.type))
        return found

    return types.int32(types.int32, firsts, results), generate


def record_at(kind: type[tuple[Any, ...]], types_of: Mapping[type, Any] = MappingProxyType({})) -> Any:
    """A function that reads a `NamedTuple` at an address: 64 bits for each of its numbers, and of those of the records in it.

    Args:
        kind: The record.
        types_of: The types of the numbers of some records. Those of others are float64 if they are annotated as floats, and int64. A number
            that is annotated as an integer, such as an address, is an int64 in any record.
    """

    def typed(kind: Any, owner: Any = None) -> Any:
        if hasattr(kind, "_fields"):
            return types.BaseTuple.from_types([typed(field, kind) for field in get_type_hints(kind).values()], kind)
        return types.int64 if kind is int else types_of.get(owner, types.float64 if kind is float else types.int64)

    whole = typed(kind)

    def read(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            indices = count()

            def loaded(kind: Any) -> Any:
                if isinstance(kind, types.BaseTuple):
                    return context.make_tuple(builder, kind, [loaded(field) for field in kind.types])
                held = types.float64 if isinstance(kind, types.Float) else types.int64
                place = builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(held)))
                return context.cast(builder, builder.load(cgutils.gep_inbounds(builder, place, next(indices))), held, kind)

            return loaded(whole)

        return whole(types.int64), generate

    return intrinsic(read)


@intrinsic
def add_at(context: Any, address: Any, number: Any) -> Any:
    """Add to the 64-bit integer at an address, to which other threads add too; returns what it was before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(types.int64)))
        return builder.atomic_rmw("add", place, arguments[1], "monotonic")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def call(context: Any, address: Any, numbers: Any) -> Any:
    """Call the compiled function of 64-bit integers at an address."""
    integer, count = ir.IntType(64), len(numbers)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [integer] * count)
        given = [builder.extract_value(arguments[1], i) for i in range(count)]
        builder.call(builder.inttoptr(arguments[0], function.as_pointer()), given)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, count)), generate


def _same_bits(source: Any, target: Any, held: ir.Type, doc: str) -> Any:
    """A function that reinterprets one type's bits as another type of the same width."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], held)

    def same_bits(context: Any, value: Any) -> Any:
        return target(source), generate

    same_bits.__doc__ = doc
    return intrinsic(same_bits)


as_float = _same_bits(types.int32, types.float32, ir.FloatType(), "The float32 of an int32's bits.")
as_int = _same_bits(types.float32, types.int32, ir.IntType(32), "The bits of a float32 as an int32.")
as_double = _same_bits(types.int64, types.float64, ir.DoubleType(), "The float64 of an int64's bits.")
as_long = _same_bits(types.float64, types.int64, ir.IntType(64), "The bits of a float64 as an int64.")
