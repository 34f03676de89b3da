"""A function of the arithmetic with another meaning: the same code with other globals, and with functions in place of some operators."""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

#: Numbers of bound modules, each taken once, also by threads that bind at the same time.
_NUMBERS = itertools.count()
#: Operators by the names that replace them.
_OPERATORS = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.BitAnd: "and_", ast.BitOr: "or_", ast.BitXor: "xor", ast.LShift: "lshift",
    ast.RShift: "rshift", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq",
}  # fmt: skip


def bound(
    module: ModuleType,
    words: Mapping[str, Any],
    wrap: Callable[[FunctionType], Any] = lambda function: function,
    constant: Callable[[int], Any] = int,
    known: Mapping[str, Any] | None = None,
) -> SimpleNamespace:
    """The functions of a module of the arithmetic, with a meaning of its vocabulary.

    Args:
        module: The module.
        words: What its names mean. `lt`, `add` and other names of the module `operator` replace operators, and those of the module's own
            functions are overrides: faster ways to the same result. `named`, if it is there, is called with the name of each variable that
            is assigned, the comment above, the line and the value.
        wrap: Makes a backend's function; those that it calls are wrapped, too.
        constant: Makes a backend's constant of an integer.
        known: Values of parameters: conditions that depend on nothing else are decided when the functions are bound.
    """
    # Compilers look a function's globals up in its module.
    home = ModuleType(f"{module.__name__}.{next(_NUMBERS)}")
    sys.modules[home.__name__] = home
    scope = home.__dict__
    scope |= {name: constant(given) for name, given in vars(module).items() if type(given) is int}
    scope |= {"__builtins__": builtins, **words}
    for name, given in vars(module).items():
        if isinstance(given, FunctionType) and given.__module__ == module.__name__ and name not in words:
            scope[name] = wrap(_with_globals(given, scope, known or {}))
    return SimpleNamespace(**scope)


def _with_globals(function: FunctionType, scope: dict[str, Any], known: Mapping[str, Any]) -> FunctionType:
    """A function that reads other globals."""
    operators = {kind: name for kind, name in _OPERATORS.items() if name in scope}
    code = _rewritten(function, operators, known, "named" in scope) if operators or known or "named" in scope else function.__code__
    made = FunctionType(code, scope, function.__name__)
    made.__doc__, made.__module__ = function.__doc__, scope["__name__"]
    return made


def _rewritten(function: FunctionType, operators: Mapping[type[ast.AST], str], known: Mapping[str, Any], names_variables: bool) -> CodeType:
    """The code of a function with calls in place of operators, and only the branches that known values lead to."""
    source = textwrap.dedent(inspect.getsource(function))
    tree = ast.parse(source)
    first = function.__code__.co_firstlineno
    if names_variables:
        tree = _Named(source.splitlines(), first).visit(tree)
    ast.increment_lineno(tree, first - 1)
    constants = {name: given for name, given in function.__globals__.items() if type(given) is int}
    tree = _Calls(operators).visit(_Decided(constants | dict(known)).visit(tree))
    compiled = compile(ast.fix_missing_locations(tree), function.__code__.co_filename, "exec")
    return next(part for part in compiled.co_consts if inspect.iscode(part))


class _Decided(ast.NodeTransformer):
    """The numbers of known records, and only the branches that are taken where conditions are known."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self._known = known
        self._records = {name for name, given in known.items() if isinstance(given, tuple)}

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if not isinstance(node.value, ast.Name) or node.value.id not in self._records:
            return node
        return ast.copy_location(ast.Constant(getattr(self._known[node.value.id], node.attr)), node)

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        names = {name.id for name in ast.walk(node.test) if isinstance(name, ast.Name)}
        if not names <= self._known.keys():
            return node
        is_true = eval(compile(ast.Expression(node.test), "<known>", "eval"), {}, dict(self._known))
        return node.body if is_true else node.orelse


class _Calls(ast.NodeTransformer):
    """Calls in place of operators."""

    def __init__(self, names: Mapping[type[ast.AST], str]) -> None:
        self._names = names

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        return self._call(node, node.op, node.left, node.right)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        return self._call(node, node.ops[0], node.left, node.comparators[0])

    def _call(self, node: ast.expr, operator: ast.AST, *operands: ast.expr) -> ast.expr:
        name = self._names.get(type(operator))
        return node if name is None else ast.copy_location(ast.Call(ast.Name(name, ast.Load()), list(operands), []), node)


class _Named(ast.NodeTransformer):
    """Calls of `named` around the values of variables."""

    def __init__(self, lines: Sequence[str], first: int) -> None:
        self._lines, self._first = [line.strip() for line in lines], first

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        (target,) = node.targets
        if isinstance(target, ast.Name):
            arguments = [
                ast.Constant(target.id),
                ast.Constant(self._comment_above(node.lineno - 1)),
                ast.Constant(self._first + node.lineno),
                node.value,
            ]
            node.value = ast.copy_location(ast.Call(ast.Name("named", ast.Load()), arguments, []), node.value)
        return node

    def _comment_above(self, place: int) -> str:
        """The comment above a line, or above the condition whose first line it is."""
        place -= 1
        while self._lines[place].startswith(("if ", "else:", "elif ")):
            place -= 1
        first = place
        while self._lines[first].startswith("#"):
            first -= 1
        return " ".join(line[1:].strip() for line in self._lines[first + 1 : place + 1])
