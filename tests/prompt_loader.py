"""Loads rows as the prompts of a run, with the tiny tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.tiny import tiny_tokenizer
from trainer.config import RunConfig
from trainer.data.prompts import PromptSets, load_prompts
from trainer.errors import Refused

USER = {"role": "user", "content": "What is 2 + 3?"}
SYSTEM = {"role": "system", "content": "Think first."}
ANSWER = {"role": "assistant", "content": "5"}
RENDERED = "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"


def write(path: Path, rows: list[Any]) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


class Loader:
    """Loads rows with data settings; the tokenizer may be replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer: PreTrainedTokenizerBase = tiny_tokenizer()

    def __call__(self, rows: list[Any], eos_ids: tuple[int, ...] = (), **data: Any) -> PromptSets:
        source = write(self.folder / "train.jsonl", rows)
        config = RunConfig(model={"name_or_path": "tiny"}, data={"source": source, **data})
        return load_prompts(config, self.tokenizer, eos_ids=eos_ids)

    def refused(self, rows: list[Any], **data: Any) -> str:
        with pytest.raises(Refused) as caught:
            self(rows, **data)
        return str(caught.value)


def said(prompts: PromptSets, *words: str) -> bool:
    return any(all(word in note for word in words) for note in prompts.notes + prompts.warnings)
