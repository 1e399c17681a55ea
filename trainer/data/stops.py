"""Which tokens end a completion."""

from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedTokenizerBase

from trainer.data.template import probe_turns
from trainer.errors import Refused


@dataclass(frozen=True)
class StopIds:
    ids: tuple[int, ...]
    """Ascending. A completion that ends with any of them is finished, not cut off."""
    notes: list[str]
    """What the user should know before the start."""


def declared_eos(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None) -> tuple[int, ...]:
    """The end tokens that a checkpoint declares, in its tokenizer and in its generation config together."""
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tuple(sorted({*own, *_generation_eos(generation_config)}))


def stop_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None) -> StopIds:
    """What the tokenizer and the generation config declare, and the token that ends a turn of the chat template.

    All of them, whether prompts are rendered or not: Qwen2.5 Base declares <|endoftext|> alone, but has seen <|im_end|>
    end a turn, and ends an answer with either. Qwen2.5: 151643 and 151645.
    """
    ids = set(declared_eos(tokenizer, generation_config))
    notes = []
    generation = _generation_eos(generation_config)
    if generation and set(generation) != {tokenizer.eos_token_id}:
        own = "none" if tokenizer.eos_token_id is None else _named(tokenizer, [tokenizer.eos_token_id])
        notes.append(
            f"the tokenizer's end token is {own}, the generation config's {_named(tokenizer, generation)}; "
            "each of them ends a completion"
        )
    try:
        turns = probe_turns(tokenizer, {})
    except Refused as broken:
        # Prompts that need the template have been refused by now; raw ones do without it.
        turns = None
        notes.append(str(broken).splitlines()[0])
    end_id = turns.end_id if turns is not None else None
    if turns is not None and end_id is None:
        notes.append(
            f"the chat template ends a turn with {turns.end or 'nothing'}, no special token of the tokenizer: answers "
            "to rendered prompts may run on to rollout.max_new_tokens; rollout.stop can name a string that ends them"
        )
    elif end_id is not None and end_id not in ids:
        notes.append(
            f"the chat template ends a turn with {_named(tokenizer, [end_id])}, which neither the tokenizer nor "
            "the generation config declares as an end token; it ends a completion, too"
        )
        ids.add(end_id)
    if not ids:
        notes.append("no end token is known: every completion runs to rollout.max_new_tokens")
    return StopIds(tuple(sorted(ids)), notes)


def _generation_eos(generation_config: GenerationConfig | None) -> list[int]:
    match generation_config.eos_token_id if generation_config else None:
        case None:
            return []
        case int() as single:
            return [single]
        case several:
            return list(several)


def _named(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return ", ".join(f"{token_id} ({tokenizer.convert_ids_to_tokens(token_id)})" for token_id in ids)
