"""Models of the collapse lab: copies of the demo's, each with one file changed."""

import json
import os
from pathlib import Path
from typing import Any

from tools.lab_run import MODEL, ROOT

MADE = ROOT / ".cache" / "lab" / "models"
SMALL_WINDOW, OTHER_TOKENIZER = MADE / "small-window", MADE / "other-tokenizer"


def make_models() -> None:
    """Copies of the demo's model: one with a window that its prompts overrun, one with a tokenizer of other ids."""
    for folder in (SMALL_WINDOW, OTHER_TOKENIZER):
        folder.mkdir(parents=True, exist_ok=True)
        for file in MODEL.iterdir():
            target = folder / file.name
            target.unlink(missing_ok=True)
            os.link(file, target)
    _rewrite(SMALL_WINDOW / "config.json", lambda config: config | {"max_position_embeddings": 16})

    def other_ids(tokenizer: dict[str, Any]) -> dict[str, Any]:
        vocab = tokenizer["model"]["vocab"]
        plain = [token for token in vocab if not token.startswith("<|")]
        ids = [vocab[token] for token in plain]
        tokenizer["model"]["vocab"] = vocab | dict(zip(plain, [*ids[5:], *ids[:5]], strict=True))
        return tokenizer

    _rewrite(OTHER_TOKENIZER / "tokenizer.json", other_ids)


def _rewrite(file: Path, change: Any) -> None:
    content = change(json.loads(file.read_text()))
    file.unlink()  # it is a link to the demo's own
    file.write_text(json.dumps(content))
