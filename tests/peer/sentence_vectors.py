"""MODE OUT TEXTS FOLDER...: the vectors of the texts, by sentence-transformers itself (theirs) or by the reward, and
the scores of each text with the one after it for its answer. Run by test_sentence_transformers.py."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch


def theirs(folder: str, texts: list[str]) -> dict[str, Any]:
    from sentence_transformers import SentenceTransformer

    vectors = SentenceTransformer(folder, device="cpu").encode(texts, normalize_embeddings=True)
    return {"vectors": vectors.tolist()}


def ours(folder: str, texts: list[str]) -> dict[str, Any]:
    from trainer.config.grpo import Reward
    from trainer.rewards.embedding import EmbeddingReward

    reward = EmbeddingReward(Reward(name="similarity", kind="embedding", path=folder))
    reward.load(torch.device("cpu"))
    rows, _ = reward._rows([text.strip() for text in texts])
    stages = [type(stage).__module__ for stage in reward.network.network.stages]  # type: ignore[union-attr]
    return {
        "vectors": reward.scored(rows).tolist(),
        "scores": reward(texts[:-1], answer=texts[1:]),
        "type": all(module.startswith("sentence_transformers") for module in stages),
    }


mode, out, texts, *folders = sys.argv[1:]
found: dict[str, Any] = {
    folder: (theirs if mode == "theirs" else ours)(folder, json.loads(texts)) for folder in folders
}
if importlib.util.find_spec("sentence_transformers") is not None:
    import sentence_transformers

    found["version"] = sentence_transformers.__version__
Path(out).write_text(json.dumps(found))
