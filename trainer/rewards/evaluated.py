"""Text that a scorer would evaluate. Some tasks of Reasoning Gym hand an answer, or a field of a row, to ``eval`` or to
sympy's ``parse_expr``, which calls it too. There is no sandbox here, so that text which is more than data does not get
there: an answer counts as an empty one, a row is not scored.
"""

import ast
import re
from typing import Any

LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks that evaluate an answer to find a list in it."""
FORMULAS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Tasks that evaluate an answer as a formula."""
ROWS = {
    "bitwise_arithmetic": ("metadata", "problem"),
    "intermediate_integration": ("metadata", "integrand"),
    "number_sorting": ("answer",),
    "polynomial_multiplication": ("answer",),
    "simple_integration": ("metadata", "integrand"),
}
"""Task -> where the field lies that it evaluates."""

FUNCTIONS = frozenset(
    (
        *("sin", "cos", "tan", "sec", "csc", "cot", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "Abs"),
        *("abs", "asin", "acos", "atan", "asinh", "acosh", "atanh", "Integral", "erf", "erfi", "Si", "Ci", "Ei", "li"),
    )
)
IN_LITERALS = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Name, ast.Load, ast.UnaryOp, ast.USub)
IN_FORMULAS = re.compile(r"[\w %&|~<>+*/^().,!-]*", re.ASCII)
ATTRIBUTE = re.compile(r"__|\.\s*[A-Za-z_]")
CALLED = re.compile(r"([A-Za-z_]\w*)\s*\(|\)\s*\(")


def as_data(task: str | None, answer: str) -> str:
    """``answer``, or "" where its task would run it."""
    if task in LITERALS and not _is_literal(answer):
        return ""
    return "" if task in FORMULAS and not _is_formula(answer.strip()) else answer


def row_is_data(task: str | None, row: dict[str, Any]) -> bool:
    """Whether what the task evaluates of a row is data. Rows of a file may hold anything."""
    value: Any = row
    for key in ROWS.get(task or "", ()):
        value = value.get(key, "") if isinstance(value, dict) else ""
    return value is row or (isinstance(value, str) and (_is_formula(value.strip()) or _is_literal(value)))


def _is_literal(text: str) -> bool:
    """Or no expression at all, which cannot be evaluated either."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        return True
    except (ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, IN_LITERALS) for node in ast.walk(tree))


def _is_formula(text: str) -> bool:
    """Numbers, names, operators, and calls of functions of mathematics."""
    called = {found[1] or "" for found in CALLED.finditer(text)}
    return bool(IN_FORMULAS.fullmatch(text)) and not ATTRIBUTE.search(text) and called <= FUNCTIONS
