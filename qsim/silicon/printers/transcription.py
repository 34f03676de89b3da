"""The arithmetic itself in JavaScript, function by function: a format's numbers stay parameters, so that one text serves all formats.

`javascript` prints what is left of the definition for one format. Here the definition is written out as it is, on BigInts, with records in
place of named tuples.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Sequence
from enum import IntEnum
from types import FunctionType, ModuleType
from typing import Any

from qsim_kernels.arithmetic import codes, rounding, scales, words
from qsim_kernels.numbers.carrier import DOUBLE, SINGLE, Carrier
from qsim_kernels.numbers.grid import Mode, Overflow
from qsim_kernels.numbers.scales import ScaleRule

_BINARY = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>"}
_COMPARED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "===", ast.NotEq: "!=="}
_UNARY = {ast.USub: "-", ast.Not: "!", ast.Invert: "~"}
_JOINED = {ast.And: "&&", ast.Or: "||"}

#: The words that JavaScript has otherwise, as in `words.operations`: numbers are given and returned as bits.
_OPERATIONS = """\
const where = (condition, chosen, other) => condition ? chosen : other;
const minimum = (a, b) => a < b ? a : b;
const maximum = (a, b) => a > b ? a : b;

// Operations of a carrier's numbers, given and returned as bits, rounded to nearest with ties to even.
function operations(Numbers, Integers) {
  const number = new Numbers(1), integer = new Integers(number.buffer);
  const to_bits = (x) => (number[0] = x, BigInt(integer[0]));
  const from_bits = (bits) => (integer[0] = typeof integer[0] === "bigint" ? bits : Number(bits), number[0]);
  return {
    to_bits, from_bits, where, minimum, maximum,
    product: (a, b) => to_bits(from_bits(a) * from_bits(b)),
    quotient: (a, b) => to_bits(from_bits(a) / from_bits(b)),
    from_integer: (x) => to_bits(Number(x)),
  };
}
"""
_MEANING = """\
function meaning(constants, operations) {
  const known = { ...constants, ...operations };
  const inner = { ...known, ...words(known) };
  const rounded = rounding(inner);
  return { ...inner, rounding: rounded, codes: codes(inner), scales: scales({ ...inner, ...rounded }) };
}
"""


def module(comment: Sequence[str]) -> str:
    """An ECMAScript module with the arithmetic on the bits of float32, `single`, and of float64, `double`."""
    parts = [
        *(f"// {line}".rstrip() for line in comment),
        "",
        *(f"export const {name} = {_numbered(kind)};" for name, kind in (("MODES", Mode), ("OVERFLOWS", Overflow), ("RULES", ScaleRule))),
        "",
        _OPERATIONS,
        functions(words, ("is_nan", "is_zero", "to_word", "to_int", "carries")),
        functions(rounding),
        functions(codes),
        functions(scales),
        _MEANING,
        f"export const single = {_carrier(SINGLE, 'Float32Array', 'Int32Array')};",
        f"export const double = {_carrier(DOUBLE, 'Float64Array', 'BigInt64Array')};",
    ]
    return "\n".join(parts) + "\n"


def functions(source: ModuleType, chosen: Iterable[str] = ()) -> str:
    """A function of a vocabulary that returns the functions of a module of the arithmetic.

    Args:
        source: The module.
        chosen: The names of its functions; all by default.
    """
    own = {name: given for name, given in vars(source).items() if isinstance(given, FunctionType) and given.__module__ == source.__name__}
    chosen = tuple(chosen) or tuple(own)
    constants = {} if source is words else {name: x for name, x in vars(source).items() if type(x) is int and not hasattr(words, name)}
    texts = [function(own[name]) for name in chosen]
    read = {node.id for name in chosen for node in ast.walk(_tree(own[name])) if isinstance(node, ast.Name)}
    # A word's own constants are the vocabulary's; other modules' functions, such as `round_bits`, come with it.
    given = sorted(name for name in read if name in vars(source) and name not in (*chosen, *constants))
    lines = [f"const {{ {', '.join(given)} }} = vocabulary;"] if given else []
    lines += [f"const {', '.join(f'{name} = {x}n' for name, x in constants.items() if name in read)};"] if constants else []
    body = "\n".join([*lines, *texts, f"return {{ {', '.join(chosen)} }};"])
    return f"function {source.__name__.rpartition('.')[2]}(vocabulary) {{\n{_indented(body)}\n}}\n"


def function(source: FunctionType) -> str:
    """A function of the arithmetic."""
    tree = _tree(source)
    parameters = [argument.arg for argument in tree.args.args]
    assigned = dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    own = [name for name in assigned if name not in parameters]
    lines = [f"let {', '.join(own)};"] if own else []
    body = "\n".join([*lines, *map(_statement, _without_docstring(tree.body))])
    title = (ast.get_docstring(tree) or "").partition("\n")[0]
    return f"// {title}\nfunction {tree.name}({', '.join(parameters)}) {{\n{_indented(body)}\n}}"


def _tree(source: FunctionType) -> ast.FunctionDef:
    (tree,) = ast.parse(inspect.getsource(source)).body
    assert isinstance(tree, ast.FunctionDef)
    return tree


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    return body[1:] if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) else body


def _statement(node: ast.stmt) -> str:
    if isinstance(node, ast.Return) and node.value is not None:
        return f"return {_expression(node.value)};"
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return f"{_expression(node.targets[0])} = {_expression(node.value)};"
    if isinstance(node, ast.If):
        text = f"if ({_expression(node.test)}) {{\n{_block(node.body)}\n}}"
        if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
            return f"{text} else {_statement(node.orelse[0])}"
        return f"{text} else {{\n{_block(node.orelse)}\n}}" if node.orelse else text
    raise TypeError(f"the arithmetic has a statement that has no text in JavaScript: {ast.unparse(node)}")


def _block(body: list[ast.stmt]) -> str:
    return _indented("\n".join(map(_statement, body)))


def _expression(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return f"{node.value}n"
    if isinstance(node, ast.Attribute):
        return f"{_expression(node.value)}.{node.attr}"
    if isinstance(node, ast.Call) and not node.keywords:
        return f"{_expression(node.func)}({', '.join(map(_expression, node.args))})"
    if isinstance(node, ast.BinOp):
        return f"({_expression(node.left)} {_named(_BINARY, node.op)} {_expression(node.right)})"
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return f"({_expression(node.left)} {_named(_COMPARED, node.ops[0])} {_expression(node.comparators[0])})"
    if isinstance(node, ast.UnaryOp):
        return f"({_named(_UNARY, node.op)}{_expression(node.operand)})"
    if isinstance(node, ast.Tuple):
        return f"[{', '.join(map(_expression, node.elts))}]"
    if isinstance(node, ast.BoolOp):
        return "(" + f" {_named(_JOINED, node.op)} ".join(map(_expression, node.values)) + ")"
    raise TypeError(f"the arithmetic has an expression that has no text in JavaScript: {ast.unparse(node)}")


def _named(operators: dict[Any, str], operator: ast.AST) -> str:
    if type(operator) not in operators:
        raise TypeError(f"the arithmetic has an operator that has no text in JavaScript: {type(operator).__name__}")
    return operators[type(operator)]


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _numbered(kind: type[IntEnum]) -> str:
    return f"{{ {', '.join(f'{each.name.lower()}: {int(each)}n' for each in kind)} }}"


def _carrier(carrier: Carrier, numbers: str, integers: str) -> str:
    constants = ", ".join(f"{name}: {value}n" for name, value in words.constants(carrier).items())
    return f"meaning({{ {constants} }}, operations({numbers}, {integers}))"
