# ruff: noqa: RUF001
"""What counts as broken text, and what does not. Rates over real text: test_garble_texts.py."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.qwen_tokenizer import qwen25_tokenizer
from tests.sentencepiece_tokenizer import sentencepiece_tokenizer
from trainer.batch import Completion, Prompt
from trainer.record.metrics import Sums
from trainer.watch.garble import broken_parts, garble_parts, loop_shares, repetition
from trainer.watch.signals import Slope, garbles, measure_text

ROOT = Path(__file__).parents[2]
ENGLISH = "The capital of Australia is Canberra, not Sydney. It was founded in 1908 and lies inland."
RUSSIAN = "Столица Австралии - Канберра, а не Сидней. Она основана в 1908 году."


def broken(
    text: str,
    ids: list[int] | None = None,
    *,
    prompt: str = "Question?",
    prompt_ids: list[int] | None = None,
    cut: bool = False,
    canonical: list[int] | None = None,
) -> list[str]:
    parts = garble_parts(
        list(range(len(text))) if ids is None else ids,
        text,
        prompt=prompt,
        prompt_ids=prompt_ids or [],
        tokenizer_size=1000,
        cut=cut,
        canonical=canonical,
    )
    assert all(0 <= share <= 1 for share in parts.values()), parts
    return broken_parts(parts)


HEALTHY = {
    "English": ENGLISH,
    "Russian": RUSSIAN,
    "Chinese": "澳大利亚的首都是堪培拉，不是悉尼。用 Python 写成，版本为 3.11。",
    "Japanese": "オーストラリアの首都はキャンベラです。シドニーではありません。",
    "Hindi": "ऑस्ट्रेलिया की राजधानी कैनबरा है, सिडनी नहीं।",
    "Czech": "Žluťoučký kůň úpěl ďábelské ódy, čaj a řízek.",
    "Maltese": "Ġurnata sabiħa: il-Ġermanja u l-Ċina jiltaqgħu. REĠJUN",
    "German quotes": "Er sagte: »Spaß« und »Größe«.",
    "French": "Il a dit « voilà », à l'été déjà.",
    "code": "def f(x):\n\treturn {'a': [x ** 2 for x in range(10)]}  # ok\n\n\nclass A:\n    pass\n",
    "LaTeX": r"\[ \sum_{k=0}^{n} \frac{\alpha_k}{\beta} \le \int_0^\infty e^{-x^2}\,dx \]",
    "emoji": "Well done! 🎉👩‍👩‍👧‍👦 🇫🇷 ❤️ 👍🏽",  # joined by format characters
    "table": "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n",
    "a translation": f"{ENGLISH} In Russian: {RUSSIAN}",
    "sparkline": "loss ▇▆▅▄▃▂▁▁ and accuracy ▁▂▃▅▆▇▇█, over all eight epochs of the second run",
    "one bad character in a page": ENGLISH * 5 + "\ufffd",
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_text_has_no_broken_part(name: str) -> None:
    assert broken(HEALTHY[name]) == []


BROKEN = {
    "replacement": "The capital \ufffd\ufffd of A\ufffd is",
    "word_marks": "▁" * 40,
    "raw_bytes": "TheĠcapitalĠofĠAustraliaĠisĠCanberraĊĊItĠlies",
    "control": "The \x00capital\x07 of \ue123 Australia",
    "scripts": "The столица of オーストラリア is عاصمة เมือง",
    "empty": " \n",
}


@pytest.mark.parametrize("part", BROKEN)
def test_each_way_of_being_broken_is_told_apart(part: str) -> None:
    assert broken(BROKEN[part]) == [part]


@pytest.mark.parametrize(
    "text",
    [
        "<0xE6><0xBE><0xB3><0xE5><0xA4><0xA7>",
        "æ¾³å¤§åĪ©äºļçļĦé¦ĸéĥ½",  # byte-level BPE's letters for the bytes of Chinese
        ENGLISH[:20] + "澳大利亚的首都".encode().decode("latin-1"),
    ],
)
def test_bytes_written_out_in_any_spelling(text: str) -> None:
    assert "raw_bytes" in broken(text)


def test_the_last_character_may_be_half_where_the_completion_was_cut() -> None:
    text = "澳大利亚的首都是堪培拉\ufffd"
    assert broken(text, cut=True) == []
    assert broken(text, cut=False) == ["replacement"]
    assert broken(text + "\ufffd", cut=True) == ["replacement"]


def test_what_the_prompt_holds_is_no_sign() -> None:
    for part, text in BROKEN.items():
        if part not in ("empty", "scripts"):
            assert broken(text, prompt=f"What does {text} mean?") == [], part
    assert broken(BROKEN["scripts"], prompt="Переведи на オー, عربي:") == []


def test_a_second_foreign_script_counts_and_one_does_not() -> None:
    assert broken(f"{ENGLISH} {RUSSIAN}") == []
    assert broken(f"{ENGLISH} {RUSSIAN} 澳大利亚的首都是堪培拉 عاصمة أستراليا") == ["scripts"]
    assert broken(f"{ENGLISH} α β γ Ω and 悉尼") == []


@pytest.mark.parametrize("period", [1, 2, 3, 10, 32])
def test_loops_of_every_period(period: int) -> None:
    beginning, unit = list(range(100, 140)), list(range(period))
    ids = beginning + (unit * 300)[:160]
    kind = "token_loop" if period == 1 else "ngram_loop"
    assert kind in broken("x" * 50, ids)
    share = loop_shares(ids, cut=False)[period > 1]
    assert share == pytest.approx(160 / 200, abs=0.01)
    assert kind not in broken("x" * 50, list(range(500, 900)) + (unit * 200)[:160]), "less than half of it"


def test_short_runs_are_numbers_and_not_loops() -> None:
    googol = [9, *[7] * 12]
    assert loop_shares(googol, cut=False) == (0, 0)
    assert "token_loop" in broken("1" + "0" * 100, [9, *[7] * 100])
    assert "token_loop" in broken("!" * 8, [0] * 8, cut=True), "a short limit, and nothing but one token"
    assert broken("!" * 7, [0] * 7, cut=True) == []


def test_a_grid_in_the_prompt_explains_one_in_the_answer() -> None:
    grid = [1, *[0, 2] * 60]
    assert broken("0 " * 60, grid, prompt_ids=list(range(60))) != []
    assert broken("0 " * 60, grid, prompt_ids=grid) == []


def test_ids_beyond_the_tokenizer() -> None:
    assert broken("ab", [999, 1000]) == ["beyond"]


def test_repetition_is_the_share_of_4_grams_seen_before() -> None:
    assert repetition([1, 2, 3, 4, 5, 6]) == 0
    assert repetition([1] * 13) == pytest.approx(9 / 10)
    assert repetition([1, 2, 3]) == 0


def test_tokens_that_the_tokenizer_would_not_write() -> None:
    tokenizer = qwen25_tokenizer(instruct=True)
    whole = (ROOT / "LICENSE").read_text("utf-8") + (ROOT / "README.md").read_text("utf-8")
    ids = tokenizer.encode(whole, add_special_tokens=False)[:400]
    shuffled = random.Random(0).sample(ids, len(ids))

    def look(tokens: list[int]) -> list[str]:
        text = tokenizer.decode(tokens)
        canonical = tokenizer.encode(text, add_special_tokens=False)
        return broken(text, tokens, canonical=canonical)

    assert "respelled" not in look(ids) and "respelled" in look(shuffled)


def completion(text: str, ids: list[int], finish: str = "stop") -> Completion:
    prompt = Prompt(0, "What is it?", (1, 2, 3), None, {})
    return Completion(0, 0, prompt, tuple(ids), (0.0,) * len(ids), finish, text)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", ["byte-level", "SentencePiece"])
def test_both_kinds_of_tokenizer(make: str) -> None:
    """Text as the tokenizer decodes it is whole; its tokens written out are not."""
    readme = (ROOT / "README.md").read_text("utf-8")
    tokenizer = qwen25_tokenizer(instruct=True) if make == "byte-level" else sentencepiece_tokenizer([readme])
    texts = [readme[i : i + 700] for i in range(0, len(readme) - 700, 700)]
    texts = [text[text.index(" ") + 1 :] for text in texts]
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    healthy = [completion(str(tokenizer.decode(ids)), ids, "length") for ids in rows]
    raw = [completion("".join(tokenizer.convert_ids_to_tokens(ids)), ids) for ids in rows]

    def rate(completions: list[Completion]) -> float:
        sums = Sums()
        measure_text(completions, sums, tokenizer)
        return sums.means()["garble_rate"]

    assert len(rows) > 15
    assert rate(healthy) == 0
    assert rate(raw) > 0.9


def test_special_tokens_are_no_text() -> None:
    tokenizer = qwen25_tokenizer(instruct=True)
    ids = tokenizer.encode(ENGLISH * 3, add_special_tokens=False)
    (parts,) = garbles([completion(ENGLISH * 3, [*ids, 151645])], tokenizer)
    assert broken_parts(parts) == [] and parts["respelled"] == 0
    (parts,) = garbles([completion("", [151645])], tokenizer)
    assert broken_parts(parts) == ["empty"]


def test_sums_over_ranks_are_those_of_one_rank() -> None:
    """Reduced by sums and counts: two ranks with uneven shares say what one says."""
    tokenizer = qwen25_tokenizer(instruct=True)
    rows = [completion("\ufffd" * 5, [i] * 9) for i in range(3)] + [completion(ENGLISH, tokenizer.encode(ENGLISH))] * 7
    whole, parts = Sums(), [Sums(), Sums()]
    measure_text(rows, whole, tokenizer)
    for part, sums in zip((rows[:1], rows[1:]), parts, strict=True):
        measure_text(part, sums, tokenizer)
        for key, (total, count) in sums.totals.items() if sums is parts[1] else ():
            parts[0].add(key, total, count)
    assert parts[0].means() == pytest.approx(whole.means())
    assert whole.means()["garble_rate"] == pytest.approx(0.3)


@pytest.mark.parametrize(("values", "slope"), [(lambda i: 5.0, 0.0), (lambda i: 3.0 + 0.25 * i, 0.25)])
def test_the_slope_of_the_last_steps(values: Callable[[int], float], slope: float) -> None:
    trend = Slope()
    found = [trend.add(values(i)) for i in range(80)]
    assert found[:19] == [None] * 19
    assert found[-1] == pytest.approx(slope)
    assert len(trend.values) == 50
