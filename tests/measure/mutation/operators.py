"""What mutants are made of: operators and names with what each is taken for, and what is left as it is."""

import ast

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
"""Operators, and what each is taken for."""

NAMES = {"min": "max", "any": "all", "argmin": "argmax", "amin": "amax", "minimum": "maximum", "floor": "ceil"}
NAMES |= {replacement: operator_name for operator_name, replacement in NAMES.items()}
"""Functions and methods, and what each is taken for."""

SYMMETRIC = {*NAMES, "isinstance", "getattr", "hasattr", "setattr", "cast", "equal", "zip"}
"""Functions whose arguments are not exchanged: it would change nothing, or break at once."""

PLAIN = (ast.Name, ast.Attribute, ast.Subscript)


def stored_names(node: ast.AST) -> set[str]:
    """Names that are given a value anywhere inside."""
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)}


def bare_call(node: ast.stmt) -> bool:
    """Whether it is a call for what it does, not for what it returns."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def called_name(node: ast.Call) -> str:
    """The last name of what is called; nothing where it has none."""
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def is_number(node: ast.expr) -> bool:
    """Whether it is a constant, with a sign or without."""
    return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant))


def joins(node: ast.BinOp) -> bool:
    """Whether it joins sequences, where another operator would only break."""
    return any(isinstance(side, (ast.Tuple, ast.List, ast.JoinedStr, ast.ListComp)) or _text(side)
               for side in (node.left, node.right))  # fmt: skip


def _text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def about_types(test: ast.expr) -> bool:
    """Whether an `if` holds only for type checkers."""
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def names_types(value: ast.expr) -> bool:
    """Whether it is an alias of types: `Callable[...]`, `tuple[...]`, `A | B`."""
    if isinstance(value, ast.BinOp):
        return isinstance(value.op, ast.BitOr) and names_types(value.left)
    inner = value.value if isinstance(value, ast.Subscript) else value
    return isinstance(inner, ast.Name) and (inner.id in ("tuple", "dict", "list", "type") or inner.id[0].isupper())


def collapse_lines(lines: bytes) -> str:
    """Source lines as one, each run of white space a blank."""
    return " ".join(lines.decode().split())
