"""Constraints as people write them: arithmetic and comparisons over named values, and nothing else.

`width * layers <= 2048`, `lr < 0.1 or warmup > 100`. The text is parsed by Python's own parser and walked node by node:
no call, attribute, subscript or comprehension exists here, so nothing can be reached from it but the values.
"""

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

MAX_TEXT_CHARS = 1_000
MAX_NODES = 200

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


class Expression:
    """A condition over names. `ValueError` where the text is none, or names what is not among `known` (None: any)."""

    def __init__(self, text: str, known: tuple[str, ...] | None) -> None:
        self.text = text
        self._body, self.names = _parse(text)
        unknown = sorted(self.names - set(known)) if known is not None else []
        if unknown and known is not None:
            raise ValueError(f"the constraint {text!r} names {unknown[0]}, and there is only {', '.join(known)}")

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Every name must have a value. What cannot be computed (a division by zero, text times text) does not hold."""
        try:
            return bool(_evaluate(self._body, values))
        except (ArithmeticError, TypeError, ValueError):
            return False


@functools.lru_cache(maxsize=512)
def _parse(text: str) -> tuple[ast.expr, frozenset[str]]:
    if len(text) > MAX_TEXT_CHARS:
        raise ValueError(f"a constraint has at most {MAX_TEXT_CHARS} characters, not {len(text)}")
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"a constraint is a comparison such as `width * layers <= 2048`, not {text!r}") from None
    nodes = list(ast.walk(body))
    if len(nodes) > MAX_NODES:
        raise ValueError(f"the constraint {text[:60]!r} is too long")
    if not isinstance(body, ast.Compare | ast.BoolOp) and not (
        isinstance(body, ast.UnaryOp) and isinstance(body.op, ast.Not)
    ):
        raise ValueError(f"a constraint is a comparison such as `width * layers <= 2048`, not {text!r}")
    _refuse_foreign(body, text)
    return body, frozenset(_names(body))


def _refuse_foreign(node: ast.expr, text: str) -> None:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return
        case ast.Name():
            return
        case ast.Attribute():
            _dotted(node, text)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY or isinstance(op, ast.Pow):
            _refuse_foreign(left, text)
            _refuse_foreign(right, text)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not(), operand=operand):
            _refuse_foreign(operand, text)
        case ast.BoolOp(values=values):
            for value in values:
                _refuse_foreign(value, text)
        case ast.Compare(left=left, ops=ops, comparators=comparators) if all(type(op) in _COMPARE for op in ops):
            for value in (left, *comparators):
                _refuse_foreign(value, text)
        case _:
            raise ValueError(f"a constraint holds numbers, names, arithmetic and comparisons; not so {text!r}")


def _dotted(node: ast.expr, text: str) -> str:
    """A parameter's name may have dots (`model.width`): no attribute is ever looked up."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, text)}.{node.attr}"
    raise ValueError(f"a constraint holds numbers, names, arithmetic and comparisons; not so {text!r}")


def _names(node: ast.expr) -> set[str]:
    if isinstance(node, ast.Name | ast.Attribute):
        return {_dotted(node, "")}
    return {name for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr) for name in _names(child)}


def _evaluate(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name() | ast.Attribute():
            return values[_dotted(node, "")]
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _number(_evaluate(left, values), float) ** _number(_evaluate(right, values), float)
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_number(_evaluate(left, values)), _number(_evaluate(right, values)))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _evaluate(operand, values)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, values)
        case ast.UnaryOp(operand=operand):
            return _evaluate(operand, values)
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_evaluate(part, values) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_evaluate(part, values) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            operands = [_evaluate(operand, values) for operand in (left, *comparators)]
            return all(_COMPARE[type(op)](a, b) for op, a, b in zip(ops, operands, operands[1:], strict=False))
        case _:
            raise AssertionError(ast.dump(node))


def _number(value: Any, kind: Callable[[Any], Any] = lambda value: value) -> Any:
    """Text times a number would be text without end; powers are of floats, which overflow early."""
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return kind(value)
