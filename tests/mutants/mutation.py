"""Small errors in a source: where they can be put, and the syntax tree with one of them in it.

Each error is one that people make in numerical code: a boundary that is in or out, a number or an
index off by one, a sign, a factor of two in a bound, the round-off of another dtype, a forgotten
abs, any for all, a condition dropped, a guard that never or always returns. Words that are only
read by people (messages, docstrings, exceptions) and annotations are left alone.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

SHOWN = 72
"""Mutants are shown, and told apart, by the largest expression around them of that length."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
SWAPPED = {
    "any": "all",
    "all": "any",
    "min": "max",
    "max": "min",
    "maximum": "minimum",
    "minimum": "maximum",
    "argmax": "argmin",
}
DROPPED_METHODS = ("abs", "nan_to_num", "clamp", "masked_fill", "sqrt", "square")
DROPPED_FUNCTIONS = ("abs", "reversed", "sorted")
ROUNDOFF = {"u": 2.0**-24, "eta": 2.0**-149}
"""What stands for the round-off of a tensor's own dtype: that of fp32."""
CONSTANTS: dict[str, float] = {"U": 2.0**-8, "ETA": 2.0**-133}
"""And for that of fp32: that of bf16."""
BOUNDS = ("Enclosure", "rounded")
"""Calls whose second argument is a bound or an error."""
UNREAD_NAMES = ("words", "text", "kind")
"""What messages are called until they are said."""
UNREAD_KEYWORDS = ("explanation", "strict", "frozen", "kw_only")


@dataclass(frozen=True)
class Mutant:
    """An error in a module.

    function: qualified name, or "" at the level of the module; line: the first one; lines: those
    of the statement; before, after: how it reads; nth: which one of the same in that function.
    """

    module: str
    function: str
    line: int
    lines: range = field(compare=False)
    before: str
    after: str
    nth: int
    number: int = field(compare=False)

    @property
    def name(self) -> str:
        """What tells it from all others, whatever stands elsewhere in the file."""
        which = f" ({self.nth})" if self.nth else ""
        return f"{self.module} | {self.function} | {self.before} -> {self.after}{which}"


class _Spot(NamedTuple):
    """A node, and how to replace it in its parent."""

    node: ast.AST
    parent: ast.AST
    field: str
    index: int | None
    around: tuple[ast.AST, ...]
    function: str
    statement: ast.stmt

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


def mutants(module: str, source: str) -> list[Mutant]:
    """All mutants of a module, in the order of the source."""
    found: list[Mutant] = []
    seen: Counter[tuple[str, str, str]] = Counter()
    for number, (spot, new) in enumerate(_variants(ast.parse(source))):
        before, after = _shown(spot, new)
        key = spot.function, before, after
        statement = spot.statement
        lines = range(statement.lineno, _last(statement) + 1)
        line = getattr(spot.node, "lineno", statement.lineno)
        found.append(Mutant(module, spot.function, line, lines, before, after, seen[key], number))
        seen[key] += 1
    return found


def mutated(source: str, number: int | None) -> ast.Module:
    """The module's tree with mutant `number` in it; None: with none."""
    tree = ast.parse(source)
    if number is not None:
        for position, (spot, new) in enumerate(_variants(tree)):
            if position == number:
                spot.put(new)
                break
        else:
            raise IndexError(f"there is no mutant {number}")
    return ast.fix_missing_locations(tree)


def _last(statement: ast.stmt) -> int:
    """The last line of its own: the head, of a statement with a body."""
    body = getattr(statement, "body", None)
    return body[0].lineno - 1 if body else statement.end_lineno or statement.lineno


def _shown(spot: _Spot, new: ast.AST) -> tuple[str, str]:
    shown: ast.AST = spot.node
    for parent in reversed(spot.around):
        if not isinstance(parent, ast.expr | ast.Return | ast.AugAssign | ast.Assign | ast.keyword):
            break
        if isinstance(parent, ast.keyword):
            continue
        if len(ast.unparse(parent)) > SHOWN:
            break
        shown = parent
    before = ast.unparse(shown)
    if shown is spot.node:
        return _one_line(before), _one_line(ast.unparse(ast.fix_missing_locations(new)))
    spot.put(new)
    after = ast.unparse(ast.fix_missing_locations(shown))
    spot.put(spot.node)
    return _one_line(before), _one_line(after)


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 2 * SHOWN else text[: 2 * SHOWN] + " ..."


def _variants(tree: ast.Module) -> Iterator[tuple[_Spot, ast.AST]]:
    for spot in _spots(tree):
        for new in _replacements(spot):
            yield spot, new


def _spots(tree: ast.Module) -> Iterator[_Spot]:
    def walk(
        node: ast.AST, around: tuple[ast.AST, ...], function: str, statement: ast.stmt | None
    ) -> Iterator[_Spot]:
        inside = function
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inside = f"{function}.{node.name}".lstrip(".")
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
                continue
            for index, child in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(child, ast.AST) or _is_read_by_people(child):
                    continue
                if isinstance(node, ast.ClassDef) and not isinstance(child, ast.FunctionDef):
                    # What a class has besides functions is in use when a mutant is put in.
                    continue
                here = child if isinstance(child, ast.stmt) else statement
                if here is not None:
                    place = index if isinstance(value, list) else None
                    yield _Spot(child, node, name, place, (*around, node), inside, here)
                yield from walk(child, (*around, node), inside, here)

    yield from walk(tree, (), "", None)


def _is_read_by_people(node: ast.AST) -> bool:
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(isinstance(one, ast.Name) and one.id in UNREAD_NAMES for one in targets)
    if isinstance(node, ast.IfExp):
        # A choice between two messages.
        return all(
            isinstance(one, ast.JoinedStr)
            or (isinstance(one, ast.Constant) and isinstance(one.value, str))
            for one in (node.body, node.orelse)
        )
    return isinstance(node, ast.keyword) and node.arg in UNREAD_KEYWORDS


def _replacements(spot: _Spot) -> Iterator[ast.AST]:
    node = spot.node
    match node:
        case ast.Compare():
            for position, operator in enumerate(node.ops):
                ops = list(node.ops)
                ops[position] = COMPARISONS[type(operator)]()
                yield ast.Compare(node.left, ops, node.comparators)
        case ast.BoolOp():
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not() | ast.Invert()):
            yield node.operand
        case ast.UnaryOp(op=ast.USub()) if not isinstance(node.operand, ast.Constant):
            yield node.operand
        case ast.BinOp() if not (_is_text(node) or _is_type(node)):
            if type(node.op) in OPERATORS:
                yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
        case ast.AugAssign() if not _is_text(node):
            if type(node.op) in OPERATORS:
                yield ast.AugAssign(node.target, OPERATORS[type(node.op)](), node.value)
        case ast.Constant():
            yield from map(ast.Constant, _other_numbers(node.value))
        case ast.Name() | ast.Attribute():
            yield from _other_roundoff(node)
        case ast.Call():
            yield from _other_calls(node)
        case ast.If() | ast.IfExp():
            yield from _conditions(node)
        case ast.comprehension() if node.ifs:
            yield ast.comprehension(node.target, node.iter, node.ifs[1:], node.is_async)
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Slice():
            yield from _other_slices(node)


def _is_text(node: ast.BinOp | ast.AugAssign) -> bool:
    """Messages are put together by + and +=."""
    return any(
        isinstance(one, ast.JoinedStr)
        or (isinstance(one, ast.Constant) and isinstance(one.value, str))
        or (isinstance(one, ast.Call) and getattr(one.func, "attr", "") == "join")
        for one in ast.walk(node)
    )


def _is_type(node: ast.BinOp) -> bool:
    """`X | None`."""
    return isinstance(node.right, ast.Constant) and node.right.value is None


def _other_numbers(value: object) -> Iterator[float | bool]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
        if value > 0:
            yield value - 1
    elif isinstance(value, float):
        yield 1.0 if value == 0 else 2 * value
        if value not in (0.0, 1.0):
            yield value / 2


def _other_roundoff(node: ast.Name | ast.Attribute) -> Iterator[ast.AST]:
    if not isinstance(node.ctx, ast.Load):
        return
    if isinstance(node, ast.Name):
        if node.id in CONSTANTS:
            yield ast.Constant(CONSTANTS[node.id])
    elif isinstance(node.value, ast.Name) and node.value.id == "format":
        if node.attr in ROUNDOFF:
            yield ast.Constant(ROUNDOFF[node.attr])
        elif node.attr == "dtype":
            yield ast.Attribute(ast.Name("torch", ast.Load()), "float32", ast.Load())
    elif isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr == "float64":
        yield ast.Attribute(node.value, "float32", ast.Load())


def _other_calls(node: ast.Call) -> Iterator[ast.AST]:
    function, arguments = node.func, node.args
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    if name in SWAPPED:
        other: ast.expr
        if isinstance(function, ast.Name):
            other = ast.Name(SWAPPED[name], ast.Load())
        else:
            assert isinstance(function, ast.Attribute)
            other = ast.Attribute(function.value, SWAPPED[name], ast.Load())
        yield ast.Call(other, arguments, node.keywords)
    if isinstance(function, ast.Attribute) and name in DROPPED_METHODS:
        yield function.value
    if isinstance(function, ast.Name) and name in DROPPED_FUNCTIONS:
        yield arguments[0]
    if name in BOUNDS and isinstance(function, ast.Name) and not _is_zero(arguments[1]):
        for factor in (2.0, 0.5):
            wider = ast.BinOp(ast.Constant(factor), ast.Mult(), arguments[1])
            yield ast.Call(function, [arguments[0], wider, *arguments[2:]], node.keywords)


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "zeros_like"


def _conditions(node: ast.If | ast.IfExp) -> Iterator[ast.AST]:
    for outcome in (True, False):
        if isinstance(node, ast.IfExp):
            yield node.body if outcome else node.orelse
        elif outcome:
            yield ast.If(ast.Constant(True), node.body, node.orelse)
        else:
            yield ast.If(ast.Constant(False), node.body, node.orelse)


def _other_slices(node: ast.Slice) -> Iterator[ast.AST]:
    if node.lower is not None and not isinstance(node.lower, ast.Constant):
        lower = ast.BinOp(node.lower, ast.Add(), ast.Constant(1))
        yield ast.Slice(lower, node.upper, node.step)
    if node.upper is not None and not isinstance(node.upper, ast.Constant):
        upper = ast.BinOp(node.upper, ast.Sub(), ast.Constant(1))
        yield ast.Slice(node.lower, upper, node.step)
