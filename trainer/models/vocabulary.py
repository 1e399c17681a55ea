"""One vocabulary for policy, reference, start adapter and replayed rollouts: token ids mean the same everywhere."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trainer.errors import Refused
from trainer.outside import NotJson, read


@dataclass(frozen=True)
class Vocabulary:
    """The token -> id map of a tokenizer, added tokens included."""

    size: int
    sha256: str
    """Of the map as JSON, sorted by token."""
    tokens: dict[str, int]

    @classmethod
    def of_tokens(cls, tokens: dict[str, int]) -> "Vocabulary":
        text = json.dumps(tokens, sort_keys=True, separators=(",", ":"))
        return cls(len(tokens), hashlib.sha256(text.encode()).hexdigest(), tokens)

    def save(self, path: Path) -> None:
        """Writes it as JSON."""
        record = {"size": self.size, "sha256": self.sha256, "tokens": self.tokens}
        path.write_text(json.dumps(record), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Vocabulary":
        """Reads what `save` wrote. Raises Refused naming the file when it is missing, broken or was changed."""
        record = _json_object(path)
        tokens = record.get("tokens")
        if not isinstance(tokens, dict) or not all(type(number) is int for number in tokens.values()):
            raise Refused(
                f'{path}: expected {{"size", "sha256", "tokens": {{token: id}}}}. Fix: record the rollouts again.'
            )
        found = cls.of_tokens(tokens)
        if found.sha256 != record.get("sha256"):
            raise Refused(f"{path}: its tokens do not have the sha256 it states; the file was changed or cut.")
        return found


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    return Vocabulary.of_tokens(tokenizer.get_vocab())


def difference(a: Vocabulary, b: Vocabulary, limit: int = 5) -> str | None:
    """The first ``limit`` tokens, by id, that differ between the two; None when all are the same."""
    if a.sha256 == b.sha256:
        return None
    differing = [token for token in {**a.tokens, **b.tokens} if a.tokens.get(token) != b.tokens.get(token)]
    differing.sort(key=lambda token: (a.tokens.get(token, b.tokens.get(token)), token))

    def words(token: str) -> str:
        one, other = (side.tokens.get(token, "missing") for side in (a, b))
        return f"{token!r} is {one} / {other}"

    more = f" and {len(differing) - limit} more" if len(differing) > limit else ""
    return ", ".join(map(words, differing[:limit])) + more


def check_same(expected: Vocabulary, other: Vocabulary, what: str) -> None:
    """Refused, naming tokens, unless ``other`` (``what``, in words) is the policy's vocabulary ``expected``."""
    differing = difference(expected, other)
    if differing is not None:
        raise Refused(
            f"{what} has another vocabulary than the policy: {other.size} tokens instead of {expected.size}.\n"
            f"Id in the policy / there: {differing}.\nFix: use models and rollouts of one tokenizer."
        )


def embedding_rows(model: PreTrainedModel) -> int:
    """Rows of the smaller of input and output embedding, also where ZeRO-3 holds a part of them only."""
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    weights = [embedding.weight for embedding in embeddings if embedding is not None]
    # A partitioned parameter has shape (0,); its whole shape is in ds_shape.
    return min((weight.ds_shape if hasattr(weight, "ds_shape") else weight.shape)[0] for weight in weights)


def check_embedding_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refused where a token has no row. More rows than tokens are padding, whose ids are never sampled."""
    rows = embedding_rows(model)
    without = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= rows)
    if without:
        names = ", ".join(f"{token!r} (id {number})" for number, token in without[:5])
        raise Refused(
            f"The tokenizer has {len(without)} tokens without a row in the model's embedding of {rows} rows: {names}. "
            "Embeddings are never resized here, since new rows would be untrained.\n"
            "Fix: use the tokenizer that belongs to the model, or resize and train the new rows beforehand."
        )


def start_adapter_base(adapter_dir: str | Path, policy_name: str) -> tuple[str, list[str]]:
    """The base model that a start adapter names ("" for none), and what the user should know about it.

    Raises Refused where the folder is no adapter, or where base and policy lie here and differ in their vocabulary.
    """
    folder = Path(adapter_dir)
    file = folder / "adapter_config.json"
    if not file.is_file():
        inside = folder / "adapter" / "adapter_config.json"
        meant = (
            f"Did you mean {inside.parent}?"
            if inside.is_file()
            else "Fix: name a folder that PEFT's save_pretrained wrote."
        )
        raise Refused(f"lora.start_adapter = {str(adapter_dir)!r}: no adapter_config.json there. {meant}")
    base = _json_object(file).get("base_model_name_or_path")
    if base is None or base == "":
        return "", [f"{file} names no base model; taking {policy_name}"]
    if not isinstance(base, str):
        raise Refused(f"{file}: base_model_name_or_path is {base!r}, expected a folder or a hub name.")
    if base == policy_name:
        return base, []
    if not (Path(base).is_dir() and Path(policy_name).is_dir()):
        return base, [
            f"{file} was trained on {base}, the policy is {policy_name}: make sure that they are the same model"
        ]
    if Path(base).resolve() != Path(policy_name).resolve():
        check_same(_of_folder(policy_name), _of_folder(base), f"The base of lora.start_adapter, {base},")
    return base, []


def _of_folder(folder: str) -> Vocabulary:
    try:
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return vocabulary_of(found)
    except Exception as error:  # tokenizers raises the bare class
        raise Refused(f"{folder}: its tokenizer cannot be read: {error}") from None


def _json_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file; Refused with the file, and line and column of a syntax error."""
    try:
        found = read(path)
    except NotJson as error:
        raise Refused(f"{path}{error.place}: not JSON: {error.reason}.") from None
    except OSError as error:
        raise Refused(f"{path}: cannot be read: {error}.") from None
    if not isinstance(found, dict):
        raise Refused(f"{path}: got a {type(found).__name__}, expected a JSON object.")
    return found
