"""kind = "model": the score of a sequence-classification model of one output, by its own tokenizer and template."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from trainer.config.grpo import Reward
from trainer.data.template import RENDER_ERRORS
from trainer.errors import Refused
from trainer.models.vocabulary import check_embedding_rows
from trainer.rewards.arguments import text_of
from trainer.rewards.calls import Failed
from trainer.rewards.frozen import ModelReward, Row, Side, padded, positions

Messages = list[dict[str, Any]]

PROBE = "What is 2 + 3?", "It is 5."
PADS = 7
TRIES_TO_CUT = 4
"""Beside one for each message: cut text may have other tokens where it begins, so that once is not always enough."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Of the score with pads beside the one without, relative to 1 and more."""


class RewardModel(ModelReward):
    """A reward function with TRL's signature, asked with what was asked and what was answered.

    A conversation longer than the model's window loses the beginning of its longest question, never a part of the
    answer: reward models read the end. An answer that is too long by itself is not scored.
    """

    kind = "sequence-classification model"

    def __init__(self, section: Reward) -> None:
        super().__init__(section)
        where = f"{self.key} = {section.path}"
        if (outputs := self.config.num_labels) != 1:
            names = ", ".join(map(str, (self.config.id2label or {}).values()))
            raise Refused(
                f"{where}: it has {outputs} outputs ({names}) and does not say which of them is the reward. Expected "
                'one (num_labels = 1). Fix: a reward model; or a kind = "python" function of yours that reads these.'
            )
        if not self.tokenizer.chat_template and self.tokenizer.sep_token_id is None:
            raise Refused(
                f"{where}: its tokenizer has neither a chat template nor a separator between two texts, so it does not "
                "say how a question and its answer are put together. Fix: its chat_template.jinja beside the tokenizer."
            )
        self.window = self.tokenizer.model_max_length
        self._pad_id = self._padding(where)
        self.class_name = ""

    def __call__(
        self,
        completions: list[Any],
        asked: list[Messages],
        log_metric: Callable[[str, float], None] | None = None,
    ) -> list[float | Failed]:
        fitted = [
            self._fitted(messages, text_of(completion)) for messages, completion in zip(asked, completions, strict=True)
        ]
        # Equal completions of a prompt are scored once.
        distinct = {tuple(row["input_ids"]): row for row, _ in fitted if not isinstance(row, Failed)}
        found = self.scored(list(distinct.values()))[:, 0].tolist() if distinct else []
        scores = dict(zip(distinct, found, strict=True))
        if log_metric is not None:
            log_metric(f"rewards/{self.name}/cut", sum(cut for _, cut in fitted) / len(fitted))
        return [row if isinstance(row, Failed) else scores[tuple(row["input_ids"])] for row, _ in fitted]

    def build(self) -> nn.Module:
        model: PreTrainedModel = self.pretrained(AutoModelForSequenceClassification)
        self.class_name = type(model).__name__
        check_embedding_rows(model, self.tokenizer)
        model.config.get_text_config().pad_token_id = self._pad_id
        self.window = min(self.window, positions(model))
        model.config.use_cache = False  # the keys and values of a decoder, which nobody reads
        return _OneOutput(model)

    @property
    def pad_id(self) -> int:
        return self._pad_id

    def side(self, network: nn.Module) -> Side:
        """The tokenizer's own side, unless pads there change a score: positions count pads in some models."""
        row = self._row([{"role": "user", "content": PROBE[0]}], PROBE[1])
        longer: Row = {name: ids + ids[:1] * PADS for name, ids in row.items()}
        network.eval()
        with torch.no_grad():
            alone = float(network(**padded([row], self._pad_id, "right")))
            own: Side = "left" if self.tokenizer.padding_side == "left" else "right"
            other: Side = "left" if own == "right" else "right"
            for side in (own, other):
                beside = float(network(**padded([row, longer], self._pad_id, side))[0])
                if abs(beside - alone) <= TOLERANCE[self.dtype] * max(1.0, abs(alone)):
                    return side
        raise Refused(
            f"{self.key} = {self.path}: pads beside a text change its score, on whichever side they are ({alone:g} "
            f"becomes {beside:g}): what a completion is worth would depend on the others of its batch. Fix: "
            "pad_token_id in its config.json as its training had it."
        )

    def described(self) -> str:
        how = "by its chat template" if self.tokenizer.chat_template else "as a pair of texts, since it has no template"
        return f"score of a {self.class_name}, question and answer {how}, up to {self.window} tokens"

    def _padding(self, where: str) -> int:
        """config.json's, by which the last token is found; of the tokenizer where config.json has none."""
        if self.stated_pad_id is not None:
            return self.stated_pad_id
        pad = self.tokenizer.pad_token_id
        last = self._row([{"role": "user", "content": PROBE[0]}], PROBE[1])["input_ids"][-1]
        if pad is None or pad == last:
            what = "has no pad token either" if pad is None else "pads with what ends a text"
            raise Refused(
                f"{where}: config.json has no pad_token_id, and its tokenizer {what}, so that the end of a padded "
                "answer cannot be found. Fix: pad_token_id in its config.json, a token that no text ends with."
            )
        return int(pad)

    def _fitted(self, messages: Messages, answer: str) -> tuple[Row | Failed, bool]:
        """The tokens of a conversation that fit the window, and whether its question was cut for it."""
        messages = [dict(message) for message in messages]
        for tries in range(TRIES_TO_CUT + len(messages)):
            try:
                row = self._row(messages, answer)
            except RENDER_ERRORS as error:
                return Failed(f"the chat template of {self.path} refuses it: {error}"), False
            beyond = len(row["input_ids"]) - self.window
            if beyond <= 0:
                return row, tries > 0
            longest = max(messages, key=lambda message: len(str(message["content"])))
            ids = self.tokenizer(str(longest["content"]), add_special_tokens=False, verbose=False)["input_ids"]
            # A cut inside of a character leaves U+FFFD at the beginning.
            longest["content"] = str(self.tokenizer.decode(ids[beyond:])).lstrip("\ufffd")
        return Failed(f"its answer does not fit the {self.window} tokens of {self.path}"), True

    def _row(self, messages: Messages, answer: str) -> Row:
        if not self.tokenizer.chat_template:
            question = "\n\n".join(str(message["content"]) for message in messages)
            return dict(self.tokenizer(question, answer, verbose=False))
        whole = [*messages, {"role": "assistant", "content": answer}]
        text = self.tokenizer.apply_chat_template(whole, tokenize=False)
        return dict(self.tokenizer(text, add_special_tokens=False, verbose=False))


class _OneOutput(nn.Module):
    """Tokens in, (B, 1) out."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, **tokens: Tensor) -> Tensor:
        scores: Tensor = self.model(**tokens).logits
        return scores
