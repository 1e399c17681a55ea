"""The rewards that ship."""

import doctest
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from trainer.batch import Completion, Prompt
from trainer.config.grpo import Reward
from trainer.errors import Refused
from trainer.rewards import builtin
from trainer.rewards.runtime import RewardRuntime


def runtime(function: str, **keys: Any) -> RewardRuntime:
    return RewardRuntime([Reward(name="r", kind="builtin", function=function, **keys)], Path("."))


def row(text: str, index: int = 0, **columns: Any) -> Completion:
    prompt = Prompt(index=index, text="?", ids=(1,), messages=None, columns=columns)
    return Completion(group=0, generation=0, prompt=prompt, ids=(5,), sampling_logps=(0.0,), finish="stop", text=text)


def test_every_example_in_the_documentation_is_true() -> None:
    result = doctest.testmod(builtin)
    assert result.attempted >= len(builtin.BUILTINS)
    assert result.failed == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 42", "42"),
        ("he has 1,234 marbles.", "1234"),
        ("1,234,567.25", "1234567.25"),
        ("x = -3", "-3"),
        ("x = \N{MINUS SIGN}3", "-3"),
        ("5-3", "3"),
        ("2^-3", "-3"),
        ("GPT-4", "4"),
        ("costs $2.50.", "2.5"),
        ("owes -$5 or $-5", "-5"),
        ("3/4 of it", "3/4"),
        ("-3/4", "-3/4"),
        ("1/0", "0"),
        (".5", "1/2"),
        ("1, 2, 3", "3"),
        ("1,2345", "2345"),
        ("007", "7"),
    ],
)
def test_last_number_reads_numbers_as_people_write_them(text: str, number: str) -> None:
    assert builtin.number_at_end(text) == Fraction(number)


GSM8K_ANSWER = "She sells 48 / 2 = <<48/2=24>>24 clips in May.\n#### 1,072"


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("It is 1072.", 1),
        ("#### 1072", 1),
        ("#### $1,072.00 dollars", 1),
        ("#### 1072 clips, 24 of them in May", 1),
        ("Not #### 9 but\n#### 1,072", 1),
        ("#### 9, though 1072", 0),
        ("so \\boxed{1072} in 2 months", 1),
        ("so \\boxed{1{,}072 \\text{ clips}} in 2 months", 1),
        ("so $\\boxed{\\frac{2144}{2}}$, 5", 1),
        ("so \\boxed{9}, or 1072", 0),
        ("\\boxed{1072", 1),
        ("#### no number, so 1072", 1),
        ("1,\\!072", 1),
        ("**1072**", 1),
        ("1072%", 1),
        ("-1072", 0),
        ("\N{MINUS SIGN}1072", 0),
        ("1072.5", 0),
        ("10,72", 0),
        ("the answer is one thousand and seventy-two", 0),
        ("", 0),
    ],
)
def test_gsm8k_reads_the_final_number(completion: str, score: int) -> None:
    assert builtin.gsm8k([completion], [GSM8K_ANSWER]) == [score]


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("#### -3", "-3"),
        ("#### 0.50", "half, .5"),
        ("#### 42 (of 50)", "42"),
        ("42", "42"),
        ("#### 3/4", ".75"),
    ],
)
def test_gsm8k_reads_the_number_after_the_marks_of_the_answer(answer: str, completion: str) -> None:
    assert builtin.gsm8k([completion, "7"], [answer] * 2) == [1.0, 0.0]


def test_gsm8k_names_rows_whose_answer_has_no_number() -> None:
    (problem,) = runtime("gsm8k").check([row("", 0, answer="5\n#### five").prompt, row("", 1, answer="#### 5").prompt])
    assert "cannot score 1 row: 1" in problem and 'no number after "####"' in problem


def test_last_number_compares_exactly() -> None:
    # As floats these two are equal.
    assert builtin.last_number(["9007199254740993"], answer=["9007199254740992"]) == [0.0]
    assert builtin.last_number(["0.50", "one half"], answer=["1/2", 1]) == [1.0, 0.0]


def test_last_number_survives_what_a_broken_model_writes() -> None:
    assert builtin.last_number(["7" * 5000, "$" * 5000, "1," * 5000], answer=["7", "7", "1"]) == [0.0, 0.0, 1.0]


def test_format_wants_each_tag_once_and_in_order() -> None:
    good = "<think>a < b</think>\n\n<answer>4</answer>\n"
    bad = [
        "<answer>4</answer><think>a</think>",
        "<think>a</think><answer></answer>",
        "<think>a</think> so <answer>4</answer>",
        "<think>a</think><think>b</think><answer>4</answer>",
        "<think>a</think><answer>4</answer><answer>5</answer>",
        "<think>a<answer>4</answer>",
    ]
    assert builtin.think_then_answer([good, *bad]) == [1.0] + [0.0] * len(bad)


def test_regex_is_the_users_pattern_in_text_and_in_chat() -> None:
    function = builtin.bind(Reward(name="r", kind="builtin", function="regex", pattern=r"^\d+$"))
    assert function(completions=["42", [{"role": "assistant", "content": "42"}], "42!"]) == [1.0, 1.0, 0.0]


def test_length_never_leaves_0_to_1() -> None:
    ids = [[5] * n for n in (0, 1, 10, 20, 1000)]
    assert builtin.length(ids, target=10) == [0.0, pytest.approx(0.1), 1.0, 0.0, 0.0]
    assert builtin.length(ids, limit=10) == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_math_verify_compares_as_mathematics() -> None:
    texts = [
        r"so \boxed{\frac{2}{4}}",
        "The answer is 0.5",
        r"$x^2 + 2x + 1$",
        "no idea",
        r"\boxed{4, 3}",
        r"\boxed{4}",
    ]
    answers = [r"\frac{1}{2}", "1/2", "$(x+1)^2$", "3", "3, 4", "3, 4"]
    assert builtin.math_verify(texts, answer=answers) == [1.0, 1.0, 1.0, 0.0, 1.0, 0.0]


def test_math_verify_leaves_unscored_what_it_cannot_compare_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unscored in the sum too: with the length's part alone, the row would stand on another scale than its group."""
    import math_verify

    def verify(gold: Any, target: Any, **options: Any) -> bool:
        while "13" in str(target):
            pass
        return True

    monkeypatch.setattr(math_verify, "verify", verify)
    monkeypatch.setattr(builtin, "SECONDS_PER_ANSWER", 0.1)
    length = Reward(name="length", kind="builtin", function="length", limit=100)
    math = Reward(name="math", kind="builtin", function="math_verify")
    rows = [row(text, answer="7") for text in ("7", "13", "7")]
    result = RewardRuntime([math, length], Path(".")).score(rows, 0)
    assert [one.reward for one in rows] == [2.0, None, 2.0]
    assert result.metrics["rewards/math/failed_fraction"] == (1.0, 3)
    assert result.messages == [
        "reward 'math' (math_verify), step 1, unscored: not compared within 0.1 s: row 1 generation 1"
    ]

    rows.append(row("7", index=1, answer="$ $"))  # raises, so that all are asked one by one
    result = RewardRuntime([math.model_copy(update={"retries": 0}), length], Path(".")).score(rows, 0)
    assert [one.reward for one in rows] == [2.0, None, 2.0, None]
    assert "not compared within 0.1 s: row 1" in result.messages[0] and "reads nothing" in result.messages[1]
    rows.pop()

    lenient = math.model_copy(update={"fallback": 0.0})
    RewardRuntime([lenient, length], Path(".")).score(rows, 0)
    assert [one.reward for one in rows] == [2.0, 1.0, 2.0]


def test_reasoning_gym_scores_as_the_task_does() -> None:
    import reasoning_gym

    task = reasoning_gym.create_dataset("countdown", size=1, seed=3)
    entry = task[0]
    solution = entry["metadata"]["expression"]
    texts = (f"<answer>{solution}</answer>", solution, "1")
    completions = [row(text, entry=entry, source="countdown") for text in texts]
    runtime("reasoning_gym").score(completions, 0)
    assert [c.reward for c in completions] == [1.0, 1.0, task.score_answer("1", entry)]


def test_reasoning_gym_scores_with_the_arguments_of_the_task() -> None:
    # This task compares digits up to the number of places that its rows were made with.
    entry = {"question": "", "answer": "0.125", "metadata": {}}
    scores = [
        builtin.reasoning_gym(["0.124"], entry=[entry], source=[f"reasoning_gym:decimal_arithmetic?{arguments}"])
        for arguments in ("max_num_decimal_places=2", "max_num_decimal_places=6")
    ]
    assert scores[0][0] != scores[1][0]


@pytest.mark.parametrize(
    ("function", "keys", "message"),
    [
        ("exact_matsch", {}, "did you mean 'exact_match'"),
        ("regex", {}, "needs the key `pattern`"),
        ("regex", {"pattern": "(a"}, "no regular expression"),
        ("length", {}, "either `target` or `limit` (tokens), got neither"),
        ("length", {"target": 3, "limit": 4}, "got target and limit"),
        ("exact_match", {"pattern": "x"}, "does not read the key 'pattern'"),
    ],
)
def test_keys_that_do_not_fit_are_refused(function: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=re.escape(message)):
        runtime(function, **keys)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Refused, match=re.escape("pip install 'zero-grpo[tasks]'")):
        runtime("math_verify")


def test_references_that_cannot_be_used_are_found_before_the_first_rollout() -> None:
    def prompts(*answers: Any) -> list[Prompt]:
        return [row("", index=i, answer=answer).prompt for i, answer in enumerate(answers)]

    assert runtime("last_number").check(prompts("#### 1", "2")) == []
    [problem] = runtime("last_number").check(prompts("1", "yes", "no"))
    assert problem == (
        "reward 'r' (last_number) cannot score 2 rows: 2, 3; row 2: ValueError: the answer 'yes' holds no number"
    )
    [problem] = runtime("math_verify").check(prompts("1", "$ $"))
    assert "cannot score 1 row: 2" in problem
    [problem] = runtime("exact_match").check(prompts("1", " ", None))
    assert "reads 'answer', which is missing or empty in 2 rows: 2, 3" in problem
    [problem] = runtime("reasoning_gym").check([row("", index=4, entry={"answer": "1"}, source="no_such_task").prompt])
    assert "1 row: 5" in problem and "no_such_task" in problem
