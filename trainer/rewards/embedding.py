"""kind = "embedding": the cosine of a completion with the row's reference answer, by a sentence encoder (bge-m3)."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel

from trainer.config.grpo import Reward
from trainer.errors import Refused
from trainer.outside import read
from trainer.rewards.arguments import text_of
from trainer.rewards.calls import Failed
from trainer.rewards.frozen import ModelReward, Row, Side, positions
from trainer.rewards.sentence_encoder import SentenceEncoder, build_stages, pooling_of, read_stages

KEPT_REFERENCES = 4096
"""Vectors of reference answers that are kept for later steps and evaluations: 16 MB at 1024 dimensions."""
NOTHING_SAID = 0.0
"""The score of an empty completion. An encoder gives its special tokens alone some vector too, whose cosine with an
answer is 0.3 and more with bge-m3: silence would be worth as much as a poor answer. 0 is the cosine of what has nothing
in common."""


class EmbeddingReward(ModelReward):
    """A reward function with TRL's signature.

    Texts longer than the encoder's window keep their beginning, and are counted. A text that several completions of a
    step share is encoded once. Of answers the vector is kept, encoded alone: completions seldom come again, and a kept
    vector from another batch would differ in its last bits from that of a resumed run.
    """

    kind = "sentence encoder"

    def __init__(self, section: Reward) -> None:
        super().__init__(section)
        self.where = f"{self.key} = {section.path}"
        self.stages = self.read(lambda: read_stages(self.folder, self.where))
        if self.config.is_encoder_decoder:
            raise Refused(f"{self.where}: {self.config.model_type} has encoder and decoder; take one with an encoder.")
        stated = self.read(lambda: self._settings("sentence_bert_config.json"))
        prompts = self.read(lambda: self._settings("config_sentence_transformers.json"))
        self.lower: bool = stated.get("do_lower_case", False)
        self.prefix: str = prompts.get("prompts", {}).get(prompts.get("default_prompt_name"), "")
        self.window = stated.get("max_seq_length") or self.tokenizer.model_max_length
        """Tokens, special ones included; no more than there are positions, once the weights are read."""
        self.tokenizer.truncation_side = "right"
        self.references: OrderedDict[str, Tensor] = OrderedDict()
        self.dimensions, self.class_name = 0, ""

    def __call__(
        self, completions: list[Any], answer: list[Any], log_metric: Callable[[str, float], None] | None = None
    ) -> list[float | Failed]:
        """From -1 to 1; 0 where nothing is said."""
        said = [text_of(completion).strip() for completion in completions]
        meant = [_text(row_answer) for row_answer in answer]
        texts = list(dict.fromkeys(text for text in said if text))
        rows, cut = self._rows(texts)
        vectors = dict(zip(texts, self.scored(rows), strict=True)) if texts else {}
        cut |= self._keep_references(list(dict.fromkeys(text for text in meant if text)))
        scores: list[float | Failed] = []
        for text, reference in zip(said, meant, strict=True):
            if not reference:
                scores.append(Failed("its reference answer is empty"))
            else:
                scores.append(_cosine(vectors[text], self.references[reference]) if text else NOTHING_SAID)
        if log_metric is not None:
            shortened = sum(text in cut or reference in cut for text, reference in zip(said, meant, strict=True))
            log_metric(f"rewards/{self.name}/cut", shortened / len(said))
            log_metric(f"rewards/{self.name}/empty", said.count("") / len(said))
        return scores

    def build(self) -> nn.Module:
        transformer = self.pretrained(AutoModel)
        self.class_name = type(transformer).__name__
        parts = dict(transformer.named_children())
        if "pooler" in parts:  # of another task, and not read here; where it is missing, it would be random
            transformer.pooler = nn.Identity()
        self.window = min(self.window, positions(transformer))
        stages = self.read(lambda: build_stages(self.stages, self.dtype, self.where))
        encoder = SentenceEncoder(transformer, stages).eval()
        with torch.no_grad():
            probe = {name: torch.tensor([ids]) for name, ids in self._rows(["1 a"])[0][0].items()}
            self.dimensions = encoder(**probe).shape[1]
        return encoder

    @property
    def pad_id(self) -> int:
        pads = (self.stated_pad_id, self.tokenizer.pad_token_id)
        return next((pad for pad in pads if pad is not None), 0)

    def side(self, network: nn.Module) -> Side:
        return "right"

    def is_unused(self, name: str) -> bool:
        return name.startswith("pooler.")

    def described(self) -> str:
        return (
            f"cosine of {self.class_name}'s vectors of {self.dimensions} numbers ({pooling_of(self.stages)}), of texts "
            f"up to {self.window} tokens"
        )

    def _rows(self, texts: Sequence[str]) -> tuple[list[Row], set[str]]:
        """The texts as tokens, and which of them were too long."""
        whole = [self._encoded(text) for text in texts]
        long = {text for text, row in zip(texts, whole, strict=True) if len(row["input_ids"]) > self.window}
        return [
            self._encoded(text, truncation=True, max_length=self.window) if text in long else row
            for text, row in zip(texts, whole, strict=True)
        ], long

    def _encoded(self, text: str, **limits: Any) -> Row:
        text = self.prefix + text
        return dict(self.tokenizer(text.lower() if self.lower else text, verbose=False, **limits))

    def _keep_references(self, texts: Sequence[str]) -> set[str]:
        """Their vectors are in ``references`` after it; which of them were too long."""
        rows, long = self._rows(texts)
        new = [place for place, text in enumerate(texts) if text not in self.references]
        if new:
            found = self.scored([rows[place] for place in new], alone=True)
            self.references |= {texts[place]: vector for place, vector in zip(new, found, strict=True)}
        for text in texts:
            self.references.move_to_end(text)
        while len(self.references) > max(KEPT_REFERENCES, len(texts)):
            self.references.popitem(last=False)
        return long

    def _settings(self, name: str) -> dict[str, Any]:
        file = self.folder / name
        found: dict[str, Any] = read(file) if file.is_file() else {}
        return found


def _text(answer: Any) -> str:
    """A reference answer: a string, the messages that hold it, or a number."""
    is_chat = isinstance(answer, list) and answer and isinstance(answer[-1], dict)
    return str(text_of(answer) if is_chat else "" if answer is None else answer).strip()


def _cosine(one: Tensor, other: Tensor) -> float:
    """Of vectors of length 1."""
    return min(1.0, max(-1.0, float(one.double() @ other.double())))
