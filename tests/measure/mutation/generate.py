"""Mutants: each way in which one operator, constant, argument or statement of a module could have been wrong."""

import ast
import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tests.measure.mutation.forms import bare, digest_of, form
from tests.measure.mutation.operators import (
    NAMES,
    PLAIN,
    SWAPPED,
    SYMMETRIC,
    about_types,
    bare_call,
    called_name,
    collapse_lines,
    is_number,
    joins,
    names_types,
    stored_names,
)

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, order=True)
class Mutant:
    """One change of one module.

    Attributes:
        module: Its dotted name.
        line: Of what is replaced, from 1.
        column: From 0, in bytes.
        operator: What kind of change it is.
        number: Which of its kind at this place, from 0.
        begin: Offset of what is replaced, in bytes of the source.
        end: Where it ends.
        replacement: What stands there instead.
        within: Names of the classes and functions around it, dotted; empty at the top of the module.
        statement: Line of the innermost statement around it.
        before: The innermost statement around it, white space collapsed; of a statement with a body, the head.
        after: The same, changed.
        signature: The `def` line of the innermost function around it, white space collapsed; empty outside functions.
        function: That function, white space collapsed.
        ordinal: The number of the statement in it, from 0.
    """

    module: str
    line: int
    column: int
    operator: str
    number: int
    begin: int
    end: int
    replacement: str
    within: str
    statement: int
    before: str
    after: str
    signature: str = ""
    function: str = ""
    ordinal: int = 0

    @cached_property
    def marker(self) -> str:
        """Digest of the form of the change: no rename, no move and no reformatting of its lines changes it."""
        return digest_of(form(self.signature, self.before, self.after))

    @cached_property
    def place(self) -> str:
        """Digest of the form of the function and of the statement's number in it: tells changes of one form apart."""
        return digest_of((*form("", self.function, ""), str(self.ordinal)))

    @property
    def id(self) -> str:
        """A name that stays while the source stays."""
        return f"{self.module}:{self.line}:{self.column}:{self.operator}:{self.number}"

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """A name that survives lines moving."""
        return self.module, self.within, self.operator, self.before, self.after

    def applied(self, source: str) -> str:
        """`source` with the change in it."""
        content = source.encode()
        return (content[: self.begin] + self.replacement.encode() + content[self.end :]).decode()


@dataclass(frozen=True)
class Place:
    """Where the walk is: names around, the statement, names that the function has so far, and why nothing counts."""

    within: tuple[str, ...] = ()
    statement: int = 0
    bound_names: frozenset[str] | None = None
    boolean: bool = False
    skipped: str | None = None
    signature: str = ""
    function: str = ""
    first: int = 0
    ordinal: int = 0
    head: tuple[int, int] = (0, 0)


def mutants_of(module: str, source: str) -> tuple[list[Mutant], Counter[str]]:
    """Every mutant of `source`, in order, and how many were left out, by rule.

    Left out is what changes no value that is computed: annotations, decorators, texts, asserts, what is raised,
    `__repr__`, and `strict` of zip.
    """
    walk = _Walk(module, source)
    walk.body(ast.parse(source).body, Place())
    return sorted(walk.mutants), walk.skipped


class _Walk:
    """One pass over a module."""

    def __init__(self, module: str, source: str) -> None:
        self.mutants: list[Mutant] = []
        self.skipped: Counter[str] = Counter()
        self._module = module
        self._content = source.encode()
        self._bare = bare(source)
        self._starts = [0]
        for line in self._content.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._edits: set[tuple[int, int, str]] = set()
        self._numbers: Counter[tuple[int, int, str]] = Counter()
        self._walked = 0

    def body(self, statements: list[ast.stmt], place: Place) -> frozenset[str] | None:
        """Walk statements one after the other; returns the names known behind them."""
        bound_names = place.bound_names
        for statement in statements:
            inner_place = replace(
                place, statement=statement.lineno, bound_names=bound_names, ordinal=self._walked - place.first
            )
            self._walked += 1
            self._statement(statement, replace(inner_place, head=self._head(statement)))
            if bound_names is not None:
                bound_names |= stored_names(statement)
        return bound_names

    def _head(self, node: ast.stmt) -> tuple[int, int]:
        """Offsets of the statement in bytes, without its body."""
        begin = self._starts[node.lineno - 1] + node.col_offset
        body: list[ast.stmt] = getattr(node, "body", [])
        if body:
            decorators = getattr(body[0], "decorator_list", [])
            return begin, self._starts[min(child.lineno for child in (body[0], *decorators)) - 1]
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return begin, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _statement(self, node: ast.stmt, place: Place) -> None:
        if isinstance(node, FUNCTIONS):
            self._function(node, place)
        elif isinstance(node, ast.ClassDef):
            self._skipping(node.decorator_list, place, "decorators")
            self.body(node.body, Place((*place.within, node.name), node.lineno, None, False, place.skipped))
        elif isinstance(node, (ast.Raise, ast.Assert)):
            self._skipping([node], place, "what is raised" if isinstance(node, ast.Raise) else "asserts")
        elif isinstance(node, (ast.If, ast.While)):
            if about_types(node.test):
                return
            for value in ("True", "False") if isinstance(node, ast.If) else ("False",):
                self._make(node.test, value, "branch", place)
            self._expression(node.test, place)
            self._blocks(node, place)
        else:
            self._simple(node, place)

    def _simple(self, node: ast.stmt, place: Place) -> None:
        if isinstance(node, ast.AnnAssign):
            self._skipping([node.annotation], place, "annotations")
            if node.value is not None:
                self._deletion(node, place)
                self._expression(node.value, place)
            return
        if isinstance(node, (ast.Break, ast.Continue)):
            self._make(node, "continue" if isinstance(node, ast.Break) else "break", "jump", place)
        elif isinstance(node, (ast.Assign, ast.AugAssign)) or bare_call(node):
            self._deletion(node, place)
        if isinstance(node, ast.AugAssign):
            self._operator(node, place)
        if isinstance(node, ast.Return) and place.boolean and not isinstance(node.value, (ast.Constant, type(None))):
            for value in ("True", "False"):
                self._make(node.value, value, "return", place)
        if isinstance(node, ast.Assign) and place.bound_names is None and names_types(node.value):
            self._skipping([node.value], place, "annotations")
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.expr, ast.withitem)):
                self._expression(child, place)
        self._blocks(node, place)

    def _blocks(self, node: ast.stmt, place: Place) -> None:
        bound_names = place.bound_names
        if bound_names is not None and isinstance(node, (ast.For, ast.With)):
            bound_names |= stored_names(node)
        for name in ("body", "orelse", "finalbody"):
            bound_names = self.body(getattr(node, name, []), replace(place, bound_names=bound_names))
        for handler in getattr(node, "handlers", []):
            self.body(handler.body, place)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, place: Place) -> None:
        self._skipping(node.decorator_list, place, "decorators")
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self._skipping([argument.annotation for argument in arguments if argument.annotation], place, "annotations")
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self._expression(default, place)
        boolean = isinstance(node.returns, ast.Name) and node.returns.id == "bool"
        skipped = "__repr__" if node.name == "__repr__" else place.skipped
        names = frozenset(argument.arg for argument in arguments)
        signature = collapse_lines(self._bare[self._starts[node.lineno - 1] : self._starts[node.body[0].lineno - 1]])
        within = (*place.within, node.name)
        assert node.end_lineno is not None
        function = collapse_lines(self._bare[self._starts[node.lineno - 1] : self._starts[node.end_lineno]])
        self.body(node.body, Place(within, node.lineno, names, boolean, skipped, signature, function, self._walked))

    def _skipping(self, nodes: Sequence[ast.AST], place: Place, why: str) -> None:
        hidden = replace(place, skipped=place.skipped or why)
        for node in nodes:
            for child in [node] if isinstance(node, ast.expr) else ast.iter_child_nodes(node):
                self._expression(child, hidden)

    def _expression(self, node: ast.AST, place: Place) -> None:
        """Everything inside an expression, the outermost first."""
        if isinstance(node, ast.JoinedStr):
            place = replace(place, skipped=place.skipped or "texts")
        if isinstance(node, (ast.Compare, ast.BoolOp, ast.BinOp)):
            self._operator(node, place)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._make(node, ast.unparse(node.operand), "not", place)
        elif isinstance(node, ast.Constant):
            self._constant(node, place)
        elif isinstance(node, ast.IfExp):
            for value in ("True", "False"):
                self._make(node.test, value, "branch", place)
        elif isinstance(node, ast.comprehension):
            for condition in node.ifs:
                self._make(condition, "True", "branch", place)
        elif isinstance(node, ast.Slice):
            for bound in (node.lower, node.upper):
                self._shifted(bound, place)
        elif isinstance(node, ast.Call):
            self._call(node, place)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.keyword) and child.arg == "strict":
                self._skipping([child], place, "strict of zip")
            else:
                self._expression(child, place)

    def _operator(self, node: ast.Compare | ast.BoolOp | ast.BinOp | ast.AugAssign, place: Place) -> None:
        kind = {ast.Compare: "compare", ast.BoolOp: "and-or"}.get(type(node), "arithmetic")
        for index, op in enumerate(node.ops if isinstance(node, ast.Compare) else [node.op]):
            replacement = SWAPPED.get(type(op))
            if replacement is None or (isinstance(node, ast.BinOp) and joins(node)):
                continue
            changed = copy.deepcopy(node)
            if isinstance(changed, ast.Compare):
                changed.ops[index] = replacement()  # type: ignore[call-overload]
            else:
                changed.op = replacement()  # type: ignore[assignment]
            self._make(node, ast.unparse(changed), kind, place)

    def _constant(self, node: ast.Constant, place: Place) -> None:
        if isinstance(node.value, bool):
            self._make(node, str(not node.value), "boolean", place)
        elif isinstance(node.value, int):
            for neighbour in (node.value + 1, node.value - 1):
                self._make(node, str(neighbour), "constant", place)
        elif isinstance(node.value, float):
            self._make(node, repr(node.value + 1), "constant", place)

    def _shifted(self, bound: ast.expr | None, place: Place) -> None:
        if bound is not None and not is_number(bound):
            for sign in "+-":
                self._make(bound, f"{ast.unparse(bound)} {sign} 1", "bound", place)

    def _call(self, node: ast.Call, place: Place) -> None:
        name = called_name(node)
        if name in NAMES and isinstance(node.func, (ast.Name, ast.Attribute)):
            changed = copy.deepcopy(node.func)
            if isinstance(changed, ast.Name):
                changed.id = NAMES[name]
            else:
                changed.attr = NAMES[name]
            self._make(node.func, ast.unparse(changed), "name", place)
        if name == "range":
            for bound in node.args[:2]:
                self._shifted(bound, place)
        for index, keyword in enumerate(node.keywords):
            if keyword.arg not in (None, "strict"):
                changed_call = copy.deepcopy(node)
                del changed_call.keywords[index]
                self._make(node, ast.unparse(changed_call), "argument", place)
        for index, (argument, next_argument) in enumerate(zip(node.args, node.args[1:], strict=False)):
            twins = (
                isinstance(argument, PLAIN)
                and isinstance(next_argument, PLAIN)
                and ast.dump(argument) != ast.dump(next_argument)
            )
            if twins and name not in SYMMETRIC:
                changed_call = copy.deepcopy(node)
                changed_call.args[index : index + 2] = changed_call.args[index + 1], changed_call.args[index]
                self._make(node, ast.unparse(changed_call), "exchange", place)

    def _deletion(self, node: ast.stmt, place: Place) -> None:
        """Leave out a statement of a function; not the one that makes a name, without which nothing runs."""
        if place.bound_names is None:
            return
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = {name for target in targets if target is not None for name in stored_names(target)}
        if names <= place.bound_names:
            self._make(node, "pass", "deletion", place)

    def _make(self, node: ast.AST, replacement: str, operator: str, place: Place) -> None:
        assert isinstance(node, (ast.expr, ast.stmt))
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[node.end_lineno - 1] + node.end_col_offset
        if isinstance(node, ast.expr) and not replacement.replace("_", "").replace(".", "").isalnum():
            replacement = f"({replacement})"
        if (begin, end, replacement) in self._edits:
            return
        self._edits.add((begin, end, replacement))
        if place.skipped is not None:
            self.skipped[place.skipped] += 1
            return
        first, last = place.head
        before = self._bare[first:last]
        after = self._bare[first:begin] + replacement.encode() + self._bare[end:last]
        spot_key = (node.lineno, node.col_offset, operator)
        number = self._numbers[spot_key]
        self._numbers[spot_key] += 1
        spot = (self._module, *spot_key, number, begin, end, replacement, ".".join(place.within), place.statement)
        context = (collapse_lines(before), collapse_lines(after), place.signature, place.function, place.ordinal)
        self.mutants.append(Mutant(*spot, *context))
