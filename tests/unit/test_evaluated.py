"""What a model wrote, and what a row holds, is never run, though scorers of Reasoning Gym evaluate it."""

import ast
import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym

from trainer.config.grpo import Reward
from trainer.rewards import builtin
from trainer.rewards.answers import Failed
from trainer.rewards.evaluated import FORMULAS, LITERALS, ROWS

EVALUATES = {"eval", "exec", "parse_expr", "sympify", "lambdify", "compile"}
OWN = {"propositional_logic"}
"""Has a ``parse_expr`` of its own, which evaluates nothing."""

HOSTILE = [
    "__import__('os').mkdir('canary')",
    "  __import__('os').mkdir('canary')",
    "[__import__('os').mkdir('canary')]",
    "(lambda: __import__('os').mkdir('canary'))()",
    "[x for x in [open('canary', 'w')]]",
    "exec('import os; os.mkdir(chr(99))')",
    "().__class__.__base__.__subclasses__()",
    "Symbol('x').__class__.__init__.__globals__['__builtins__']['open']('canary', 'w')",
    "sin(x).func.__module__.__class__(open('canary', 'w'))",
    "preview(x)",
    "x.subs (x, 1)",
    "open\n('canary', 'w')",
    "sympify (x)",
    'f\'{__import__("os").mkdir("canary")}\'',
    "(" * 5000,
    "1 if __import__('os').mkdir('canary') else 2",
]


def entry(task: str) -> dict[str, Any]:
    found = reasoning_gym.create_dataset(task, size=1, seed=5)[0]
    return json.loads(json.dumps(found, default=str))


def score(answer: str, row: dict[str, Any], task: str) -> Any:
    return builtin.reasoning_gym([f"<answer>{answer}</answer>"], [row], [f"reasoning_gym:{task}"])[0]


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """In an empty folder."""
    monkeypatch.chdir(tmp_path)
    return os.listdir()


@pytest.mark.parametrize("task", sorted(LITERALS | FORMULAS))
def test_s11_no_reward_runs_what_a_model_wrote(task: str, evaluated: list[str]) -> None:
    row = entry(task)
    worst = score("no answer at all", row, task)
    for answer in HOSTILE:
        assert score(answer, row, task) <= worst + 0.05, answer
        assert os.listdir() == evaluated, answer
    composite = row | {"metadata": (row["metadata"] or {}) | {"source_dataset": task}}
    assert score(HOSTILE[0], composite, task) <= worst and os.listdir() == evaluated


def test_s11_a_scorer_would_run_it(evaluated: list[str]) -> None:
    """The task alone, without what keeps code from it."""
    task = reasoning_gym.create_dataset("spiral_matrix", size=1, seed=5)
    task.score_answer(answer=HOSTILE[0], entry=task[0])
    assert os.listdir() == ["canary"]


@pytest.mark.parametrize(
    ("task", "answer", "worth"),
    [
        ("spiral_matrix", None, 1.0),
        ("binary_matrix", None, 1.0),
        ("string_insertion", None, 1.0),
        ("string_insertion", "as a list", 0.1),
        ("n_queens", None, 1.0),
        ("polynomial_multiplication", None, 1.0),
        ("simple_integration", None, 1.0),
        ("intermediate_integration", None, 1.0),
        ("countdown", "expression", 1.0),
        ("bitwise_arithmetic", None, 1.0),
        ("number_sorting", None, 1.0),
    ],
)
def test_honest_answers_are_worth_what_they_were(task: str, answer: str | None, worth: float) -> None:
    row = entry(task)
    right = row["answer"]
    said = {None: right, "as a list": str(list(right)), "expression": row["metadata"].get("expression", "")}[answer]
    assert score(said, row, task) == worth


@pytest.mark.parametrize("task", sorted(ROWS))
def test_s11_a_row_that_holds_code_is_not_scored(task: str, evaluated: list[str]) -> None:
    row = entry(task)
    answer, holder = row["answer"], row
    *path, field = ROWS[task]
    for key in path:
        holder = holder[key]
    holder[field] = HOSTILE[0]
    assert isinstance(score(answer, row, task), Failed) and os.listdir() == evaluated


def test_s11_every_task_that_evaluates_is_known() -> None:
    """Of the release that is installed: where score_answer, or what it calls by that name, evaluates text."""
    found = set()
    for path in Path(reasoning_gym.__file__).parent.rglob("*.py"):
        text = path.read_text("utf-8")
        for function in ast.walk(ast.parse(text)) if any(name in text for name in EVALUATES) else ():
            if isinstance(function, ast.FunctionDef) and function.name in ("score_answer", "verify_solution"):
                calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                names = {call.id if isinstance(call, ast.Name) else getattr(call, "attr", "") for call in calls}
                found |= {path.stem} if names & EVALUATES else set()
    assert found - OWN == LITERALS | FORMULAS | set(ROWS)


@pytest.mark.parametrize("name", sorted(set(builtin.BUILTINS) - {"reasoning_gym"}))
def test_s11_no_other_builtin_runs_it(name: str, evaluated: list[str]) -> None:
    more = {"regex": {"pattern": "x"}, "length": {"limit": 5}}.get(name, {})
    function = builtin.bind(Reward(name="r", kind="builtin", function=name, **more))
    said = [f"The answer is {code}, \\boxed{{{code}}} ${code}$ #### {code}" for code in HOSTILE if len(code) < 500]
    columns = {"completions": said, "answer": ["2"] * len(said), "completion_ids": [[1]] * len(said)}
    names = inspect.signature(function).parameters
    function(**{name: values for name, values in columns.items() if name in names})
    assert os.listdir() == evaluated
