"""Changes of a function's syntax tree: drop this call, flip this comparison, never take this branch.

What a change looks for must stand in the function exactly once. It is named by a piece of code that is compared as a
tree, so that lines, spaces and parentheses do not count. ``...`` in it stands for any expression, ``f(...)`` for a call
with any arguments.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_OPERATORS = {"<": ast.Lt, "<=": ast.LtE, ">": ast.Gt, ">=": ast.GtE, "==": ast.Eq, "!=": ast.NotEq}


class Change(NamedTuple):
    """Of one node of a function."""

    node: str  # what it is, for errors
    is_it: Callable[[ast.AST], bool]  # whether it is this one
    changed: Callable[[Any], ast.AST]  # what stands in its place; may be the node itself, changed

    def apply(self, tree: ast.Module, functions: Sequence[ast.AST]) -> None:
        """Change the one node in some functions of the tree.

        Raises:
            ValueError: They have no such node, or several.
        """
        found = [node for function in functions for node in ast.walk(function) if self.is_it(node)]
        if len(found) != 1:
            raise ValueError(f"expects {self.node} once, but finds it {len(found)} times")
        (node,) = found
        changed = ast.fix_missing_locations(ast.copy_location(self.changed(node), node))
        for root in [tree] if node in functions else functions:
            _Replace(node, changed).visit(root)


def drop(statement: str) -> Change:
    """Leave out a statement. A mere name is that of the function or method that the statement calls."""
    if not statement.isidentifier():
        return Change(f"the statement '{statement}'", _like(_statement(statement)), lambda _: ast.Pass())

    def calls(node: ast.AST) -> bool:
        return isinstance(node, ast.Expr) and _is_call_of(node.value, statement)

    return Change(f"a statement that calls {statement}()", calls, lambda _: ast.Pass())


def replace(code: str, other: str) -> Change:
    """Put an expression in the place of another one, or a statement in that of a statement."""
    before, after = _node(code), _node(other)
    if isinstance(before, ast.stmt) or isinstance(after, ast.stmt):
        before, after = _statement(code), _statement(other)
    return Change(f"'{code}'", _like(before), lambda _: after)


def never(condition: str) -> Change:
    """Take a condition of an ``if``, or an operand of one with ``and`` or ``or``, for false."""
    is_condition = _like(_node(condition))

    def is_it(node: ast.AST) -> bool:
        if isinstance(node, ast.BoolOp):
            return any(map(is_condition, node.values))
        return isinstance(node, (ast.If, ast.IfExp)) and is_condition(node.test)

    def changed(node: Any) -> ast.AST:
        if isinstance(node, ast.BoolOp):
            node.values = [ast.Constant(False) if is_condition(value) else value for value in node.values]
        else:
            node.test = ast.Constant(False)
        return node

    return Change(f"the condition '{condition}'", is_it, changed)


def negate(condition: str) -> Change:
    return Change(f"'{condition}'", _like(_node(condition)), lambda node: ast.UnaryOp(ast.Not(), node))


def flip(comparison: str, operator: str) -> Change:
    """Compare with another operator."""

    def changed(node: ast.Compare) -> ast.Compare:
        node.ops = [_OPERATORS[operator]()]
        return node

    return Change(f"'{comparison}'", _like(_node(comparison)), changed)


def without(operand: str) -> Change:
    """Leave out an operand of an ``and`` or ``or``."""
    is_operand = _like(_node(operand))

    def is_it(node: ast.AST) -> bool:
        return isinstance(node, ast.BoolOp) and any(is_operand(value) for value in node.values)

    def changed(node: ast.BoolOp) -> ast.AST:
        node.values = [value for value in node.values if not is_operand(value)]
        return node if len(node.values) > 1 else node.values[0]

    return Change(f"'{operand}' beside an 'and' or 'or'", is_it, changed)


def argument(function: str, place: int | str, value: str | None) -> Change:
    """Call a function or method with another argument, given by its position or keyword; with None, leave it out."""

    def holds(node: ast.AST) -> bool:
        if not _is_call_of(node, function):
            return False
        return place < len(node.args) if isinstance(place, int) else place in [word.arg for word in node.keywords]

    def changed(node: ast.Call) -> ast.Call:
        if isinstance(place, int):
            node.args[place : place + 1] = [] if value is None else [_node(value)]
        else:
            (word,) = (word for word in node.keywords if word.arg == place)
            if value is None:
                node.keywords.remove(word)
            else:
                word.value = _node(value)
        return node

    return Change(f"a call of {function}() with argument {place}", holds, changed)


def assign(target: str, value: str) -> Change:
    """Assign another value."""
    is_target = _like(_node(target))

    def is_it(node: ast.AST) -> bool:
        if isinstance(node, ast.Assign):
            return any(is_target(one) for one in node.targets)
        return isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and is_target(node.target)

    def changed(node: Any) -> ast.AST:
        node.value = _node(value)
        return node

    return Change(f"an assignment to '{target}'", is_it, changed)


def returns(value: str) -> Change:
    """Return another value from a function with one ``return``."""
    return Change("a return", lambda node: isinstance(node, ast.Return), lambda _: ast.Return(_node(value)))


class _Replace(ast.NodeTransformer):
    def __init__(self, before: ast.AST, after: ast.AST) -> None:
        self._before, self._after = before, after

    def visit(self, node: ast.AST) -> ast.AST:
        return self._after if node is self._before else self.generic_visit(node)


def _statement(code: str) -> ast.stmt:
    (statement,) = ast.parse(code).body
    return statement


def _node(code: str) -> ast.AST:
    """An expression, or else a statement."""
    try:
        return ast.parse(code, mode="eval").body
    except SyntaxError:
        return _statement(code)


def _like(pattern: ast.AST) -> Callable[[ast.AST], bool]:
    return lambda node: _matches(pattern, node)


def _matches(pattern: Any, node: Any) -> bool:
    if isinstance(pattern, list):
        return isinstance(node, list) and len(pattern) == len(node) and all(map(_matches, pattern, node))
    if not isinstance(pattern, ast.AST):
        return bool(pattern == node) and type(pattern) is type(node)
    if _is_wildcard(pattern):
        return isinstance(node, ast.expr)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Call) and len(pattern.args) == 1 and _is_wildcard(pattern.args[0]):
        return _matches(pattern.func, node.func)
    fields = [field for field in pattern._fields if field not in ("ctx", "kind", "type_comment")]
    return all(_matches(getattr(pattern, field, None), getattr(node, field, None)) for field in fields)


def _is_wildcard(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _is_call_of(node: ast.AST, name: str) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return name == (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None))
