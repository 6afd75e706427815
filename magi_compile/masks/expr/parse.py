"""Reads the printed form of mask expressions."""

from __future__ import annotations

import ast
from typing import Any

from magi_compile.functions.names import INDICES
from magi_compile.masks.expr.expr import (
    FITS,
    INFIX,
    PREFIX,
    Expr,
    ExprError,
    build,
    const,
    symbol,
    table,
    var,
)


def _kind_of(text: str) -> type:
    """The kind of operator that Python's parser sees."""
    node: Any = ast.parse(text, mode="eval").body
    return type(node.ops[0] if isinstance(node, ast.Compare) else node.op)


_AST_OPS = {
    **{_kind_of(f"x {sign} y"): op for op, (sign, _) in INFIX.items()},
    **{_kind_of(f"{sign}x"): op for op, sign in PREFIX.items()},
}
_CALLS = {"min": 2, "max": 2, "abs": 1, "where": 3, **dict.fromkeys(FITS, 1)}


def parse(text: str) -> Expr:
    """Reads what `str(expr)` wrote. Raises ExprError for a text that is not a mask expression."""
    try:
        return _read(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ExprError(f"not a mask expression: {text!r} ({error.msg})") from None


def _read(node: ast.expr) -> Expr:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return const(node.value)
    if isinstance(node, ast.Name):
        if node.id in INDICES:
            return var(node.id)
        number = node.id[1:]
        if node.id[0] in "st" and number.isdecimal():
            return symbol(int(number)) if node.id[0] == "s" else table(int(number))
    if isinstance(node, ast.Subscript):
        base = _read(node.value)
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if base.op == "table":
            return table(*base.args, *map(_read, items))
    if isinstance(node, ast.BinOp) and type(node.op) in _AST_OPS:
        return build(_AST_OPS[type(node.op)], _read(node.left), _read(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _AST_OPS:
        return build(_AST_OPS[type(node.op)], _read(node.operand))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _AST_OPS:
        return build(_AST_OPS[type(node.ops[0])], _read(node.left), _read(node.comparators[0]))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        name = node.func.id
        if _CALLS.get(name) == len(node.args):
            return build(name, *map(_read, node.args))
    raise ExprError(f"not a mask expression: {ast.unparse(node)!r}")
