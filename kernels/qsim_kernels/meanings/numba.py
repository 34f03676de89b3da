"""The vocabulary for the scalars that Numba compiles: int32 or int64 for bits, unsigned integers for words.

Numba's own operators make 64 bits of 32 and a number, which halves what vectors hold. Here a number takes the type of the other operand.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types as numba_types
from numba.extending import intrinsic

from qsim_kernels import arithmetic
from qsim_kernels.arithmetic import words
from qsim_kernels.meanings.binding import bound
from qsim_kernels.numbers.carrier import DOUBLE, SINGLE, Carrier, Variant
from qsim_kernels.numbers.scales import variant_of_scales
from qsim_kernels.numbers.updates import UpdateVariant

types: Any = numba_types
_WORD = 0xFFFFFFFF


def _common(a: Any, b: Any) -> Any:
    """The type of an operation: that of the first operand, but numbers of the source, which have 64 bits, give way."""
    first, second = types.unliteral(a), types.unliteral(b)
    return second if first == types.int64 else first


def _operation(make: Callable[..., Any], result: Any = None) -> Any:
    """An operation on two numbers, by a function of LLVM's builder, whether they have signs, and the numbers."""

    def operation(context: Any, a: Any, b: Any) -> Any:
        kind = _common(a, b)

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            one, other = (context.cast(builder, value, source, kind) for value, source in zip(given, signature.args, strict=True))
            return make(builder, getattr(kind, "signed", False), one, other)

        return (result or kind)(a, b), generate

    return intrinsic(prefer_literal=True)(operation)


def _comparison(sign: str) -> Any:
    def make(builder: Any, signed: bool, a: Any, b: Any) -> Any:
        return (builder.icmp_signed if signed else builder.icmp_unsigned)(sign, a, b)

    return _operation(make, types.boolean)


def _selection(sign: str) -> Any:
    def make(builder: Any, signed: bool, a: Any, b: Any) -> Any:
        return builder.select((builder.icmp_signed if signed else builder.icmp_unsigned)(sign, a, b), a, b)

    return _operation(make)


def _arithmetic(name: str) -> Any:
    """An operation on the floats that integers are the bits of."""

    def make(builder: Any, signed: bool, a: Any, b: Any) -> Any:
        real = ir.FloatType() if a.type.width == 32 else ir.DoubleType()
        return builder.bitcast(getattr(builder, name)(builder.bitcast(a, real), builder.bitcast(b, real)), a.type)

    return _operation(make)


@intrinsic(prefer_literal=True)
def where(context: Any, condition: Any, chosen: Any, other: Any) -> Any:
    """One of two numbers."""
    kind = _common(chosen, other)

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        pair = (context.cast(builder, value, source, kind) for value, source in zip(given[1:], signature.args[1:], strict=True))
        return builder.select(context.cast(builder, given[0], condition, types.boolean), *pair)

    return kind(condition, chosen, other), generate


def _conversion(kind: Any) -> Any:
    """A conversion to a type."""

    def convert(context: Any, x: Any) -> Any:
        return kind(x), lambda context, builder, signature, given: context.cast(builder, given[0], x, kind)

    return intrinsic(convert)


def _entry(kind: Any) -> Any:
    """A number of 64 bits of a table at an address, as a type."""

    def entry(context: Any, table: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            place = builder.inttoptr(given[0], ir.IntType(64).as_pointer())
            at = builder.gep(place, [context.cast(builder, given[1], index, types.int64)], source_etype=ir.IntType(64))
            number = builder.load(at, typ=ir.IntType(64))
            # Nothing writes to a table: otherwise each result that is written might change it.
            number.set_metadata("invariant.load", builder.module.add_metadata([]))
            return context.cast(builder, number, types.int64, kind)

        return kind(table, index), generate

    return intrinsic(entry)


_OPERATIONS = {
    "add": _operation(lambda builder, _, a, b: builder.add(a, b)),
    "sub": _operation(lambda builder, _, a, b: builder.sub(a, b)),
    "mul": _operation(lambda builder, _, a, b: builder.mul(a, b)),
    "and_": _operation(lambda builder, _, a, b: builder.and_(a, b)),
    "or_": _operation(lambda builder, _, a, b: builder.or_(a, b)),
    "xor": _operation(lambda builder, _, a, b: builder.xor(a, b)),
    "lshift": _operation(lambda builder, _, a, b: builder.shl(a, b)),
    "rshift": _operation(lambda builder, signed, a, b: (builder.ashr if signed else builder.lshr)(a, b)),
    "lt": _comparison("<"),
    "gt": _comparison(">"),
    "ge": _comparison(">="),
    "eq": _comparison("=="),
    "minimum": _selection("<"),
    "maximum": _selection(">"),
    "where": where,
    "total": _arithmetic("fadd"),
    "difference": _arithmetic("fsub"),
    "product": _arithmetic("fmul"),
    "quotient": _arithmetic("fdiv"),
}


def _inlined(function: Callable[..., Any]) -> Any:
    """A function that LLVM copies into its callers."""
    return numba.njit(_nrt=False, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)(function)


def rounding(carrier: Carrier, variant: Variant) -> SimpleNamespace:
    """The functions of `arithmetic.rounding` for a carrier's bits, compiled for a variant."""
    bits, word = (types.int32, types.uint32) if carrier == SINGLE else (types.int64, types.uint64)
    unsigned: Any = np.uint32 if carrier == SINGLE else np.uint64
    zero, one, last = map(unsigned, (0, 1, carrier.drawn - 1))

    @_inlined
    def carries(a, b):
        # By a comparison the compiler would use the processor's carry bit, of which vectors have none.
        return (a >> one) + (b >> one) + (a & b & one) >> last != zero

    conversions = {"carries": carries, "to_word": _conversion(word), "to_int": _conversion(bits), "to_long": _conversion(types.int64)}
    vocabulary = _vocabulary(carrier) | conversions
    known = {"variant": variant}
    if variant.table:
        memory = {"entry": _entry(bits), "long_entry": _entry(types.int64), "unrolled": range}
        vocabulary |= vars(bound(arithmetic.tables, vocabulary | memory, _inlined, known=known))
    return bound(arithmetic.rounding, vocabulary, _inlined, known=known)


def scales(rule: int) -> SimpleNamespace:
    """The functions of `arithmetic.scales` that compute scales, compiled for a `ScaleRule`; they do not read `rule` and `rounding`."""
    round_bits = rounding(DOUBLE, variant_of_scales(rule)).round_bits
    return bound(arithmetic.scales, _vocabulary(DOUBLE) | {"round_bits": round_bits}, _inlined, known={"rule": rule})


def _vocabulary(carrier: Carrier) -> dict[str, Any]:
    given = words.constants(carrier) | _OPERATIONS
    defined = bound(words, given, _inlined)
    return given | {"is_nan": defined.is_nan, "is_zero": defined.is_zero}


#: The functions of `arithmetic.scales` for float32 elements, and those of `arithmetic.hadamard`.
elements, hadamard = (bound(module, _vocabulary(SINGLE), _inlined) for module in (arithmetic.scales, arithmetic.hadamard))


def sums(vocabulary: dict[str, Any]) -> SimpleNamespace:
    """The functions of `arithmetic.sums` for float64 numbers.

    Args:
        vocabulary: `bits_of` and `from_bits`, and functions that go through the terms of a step or round, in place of the defined ones.
    """
    names = {"where": where, "minimum": _OPERATIONS["minimum"], "maximum": _OPERATIONS["maximum"], "round_down": _round_down}
    vocabulary = words.constants(DOUBLE) | names | vocabulary
    faster = vars(bound(arithmetic.float_sums, vocabulary, _inlined))
    return bound(arithmetic.sums, {name: given for name, given in faster.items() if not name.startswith("__")} | vocabulary, _inlined)


@_inlined
def _round_down(x):
    return np.floor(x)


_in_64_bits = {**_OPERATIONS, "unrolled": range}
_in_64_bits |= {name: vars(bound(words, _OPERATIONS, _inlined))[name] for name in ("low_word", "wide_product")}
#: `arithmetic.philox.philox` for words in 64 bits.
philox = bound(arithmetic.philox, _in_64_bits, _inlined).philox
#: The functions of `arithmetic.mixing` for an index in 64 bits; in 32, where they suffice, vectors hold twice as many words.
mixing = bound(arithmetic.mixing, _in_64_bits | {"low_word": _conversion(types.uint32)}, _inlined)


@intrinsic
def _square_root(context: Any, x: Any) -> Any:
    """The root as the processor computes it: correctly rounded."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.sqrt", [ir.FloatType()]), given)

    return types.float32(types.float32), generate


@_inlined
def _larger(a, b):
    return b if b > a or np.isnan(b) else a


def updates(how: UpdateVariant) -> SimpleNamespace:
    """The functions of `arithmetic.updates` for float32 numbers, compiled for a variant whose intermediates are not rounded."""
    divide, rounded = _inlined(lambda a, b: a / b), _inlined(lambda x, inner, how: x)
    vocabulary = {"divide": divide, "square_root": _square_root, "larger": _larger, "rounded": rounded}
    return bound(arithmetic.updates, vocabulary, _inlined, known={"how": how})
