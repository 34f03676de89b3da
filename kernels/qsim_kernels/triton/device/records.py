"""Kernels with records as parameters. A record is passed as its fields: 64-bit integers, on whose values no kernel is specialized.

Triton takes tuples, too, but always specializes on their elements, up to version 3.7 at least: on a 1, on multiples of 16 and on the width
of each, whatever `do_not_specialize` and annotations say. Most formats would have a kernel of their own.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Collection, Iterable
from typing import Any, get_type_hints

import triton
import triton.language as tl


def kernel(
    *, specialize: Collection[str] = (), do_not_specialize: Iterable[str] = (), **options: Any
) -> Callable[[Callable[..., None]], Any]:
    """Make a kernel of a function: `triton.jit`, with a parameter for each field of a `NamedTuple`, which its first lines make again.

    Args:
        specialize: The parameters annotated with `tl.int64` on whose values it is specialized.
        do_not_specialize: Those on whose values it is not specialized although they have no annotation.
        **options: Other options of `triton.jit`.
    """

    def define(function: Callable[..., None]) -> Any:
        definition, integers = _with_fields(function)
        plain = [*(name for name in integers if name not in specialize), *do_not_specialize]
        text, place = ast.unparse(definition), f"<{function.__module__}.{function.__name__}>"
        linecache.cache[place] = len(text), None, text.splitlines(keepends=True), place
        scope: dict[str, Any] = {}
        exec(compile(text, place, "exec"), function.__globals__, scope)
        return triton.jit(do_not_specialize=plain, **options)(scope[function.__name__])

    return define


def _with_fields(function: Callable[..., None]) -> tuple[ast.FunctionDef, list[str]]:
    """The definition of a function of fields in place of records, and the names of the parameters that are 64-bit integers."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    kinds = inspect.get_annotations(function, eval_str=True)
    parameters: list[ast.arg] = []
    records: list[ast.stmt] = []
    integers: list[str] = []
    for parameter in definition.args.args:
        kind, name = kinds.get(parameter.arg), parameter.arg
        if hasattr(kind, "_fields"):
            names, made = _from_fields(kind, name, function.__globals__)
            parameters += [ast.arg(field, ast.parse("tl.int64", mode="eval").body) for field in names]
            records += ast.parse(f"{name} = {made}").body
            integers += names
        else:
            parameters.append(parameter)
            integers += [name] if kind is tl.int64 else []
    definition.decorator_list, definition.args.args = [], parameters
    definition.body[1:1] = records  # after the docstring
    return ast.fix_missing_locations(definition), integers


def _from_fields(kind: Any, name: str, scope: dict[str, Any]) -> tuple[list[str], str]:
    """The names of the numbers of a record and of the records in it, and the text that makes it of them; their classes get into a scope."""
    if not hasattr(kind, "_fields"):
        return [name], name
    scope.setdefault(kind.__name__, kind)
    parts = [_from_fields(hint, f"{name}_{field}", scope) for field, hint in get_type_hints(kind).items()]
    return [field for names, _ in parts for field in names], f"{kind.__name__}({', '.join(made for _, made in parts)})"
