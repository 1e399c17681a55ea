"""Probes of what was loaded: tokenizer, weights, RoPE, reference. None of them samples."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import nn

from trainer.batch import Completion, ReferenceScores
from trainer.data.stops import declared_eos
from trainer.doctor.finding import Finding
from trainer.doctor.parts import Parts, logps, reference_logps
from trainer.errors import Refused
from trainer.models.fingerprint import fingerprint
from trainer.models.rope_built import check_built, same_rope
from trainer.models.vocabulary import difference, embedding_rows, vocabulary_of
from trainer.rollout.rope_guard import check_window
from trainer.state import State
from trainer.update import forward, kl_of, passes

LONGEST_READ = 256
"""Tokens of a prompt that are scored."""
FAR = 100.0
"""Nats between reference and policy on one token, as a policy has them that falls apart: e^88.7 is the end of fp32."""
MOST_ROWS = 1.2
"""Rows of the embedding, of its tokens; what is more belongs to another tokenizer."""


def tokenizer(parts: Parts) -> Finding | str:
    """One vocabulary decodes and encodes; a prompt's ids are its text; the model's end token is the tokenizer's."""
    state = parts.state
    own = state.policy.tokenizer
    if other := difference(vocabulary_of(own), vocabulary_of(state.decoder.tokenizer)):
        return Finding("tokenizer_mismatch", 0.97, {"policy_against_decoder": other})
    for prompt in state.prompts[:64]:
        text, back = ("".join(one.split()) for one in (prompt.text, str(own.decode(list(prompt.ids)))))
        if text not in back and back not in text:
            return Finding("tokenizer_mismatch", 0.7, {"prompt": prompt.text[:80], "its_ids_decoded": back[:80]})
    rows, named = embedding_rows(state.policy.causal), _end_tokens(state.policy.causal.config.eos_token_id)
    special = {*own.all_special_ids, *own.get_added_vocab().values()}
    ends = {*declared_eos(own, state.policy.generation_config), *named}
    if strange := sorted(token for token in ends if token not in special):
        names = [str(token) for token in own.convert_ids_to_tokens([one for one in strange if one < len(own)])]
        return Finding("tokenizer_mismatch", 0.75, {"end_tokens_of_the_model": strange, "to_the_tokenizer": names})
    if rows > MOST_ROWS * len(own):  # Qwen2.5 pads its matrix by 0.2 %, DeepSeek by 2 %
        return Finding("tokenizer_mismatch", 0.75, {"rows_of_the_model": rows, "tokens_of_the_tokenizer": len(own)})
    return f"{len(own)} tokens, prompts decode to their text, ends {list(state.decoder.stop_ids)}"


def _end_tokens(value: int | list[int] | None) -> list[int]:
    """A config's eos_token_id."""
    return [] if value is None else [value] if isinstance(value, int) else value


def finite_weights(parts: Parts) -> Finding | str:
    models: dict[str, nn.Module] = {"policy": parts.state.policy.causal}
    if parts.state.reference and parts.state.reference.copy:
        models["reference"] = parts.state.reference.copy.causal
    bad = [
        f"{what} {name}"
        for what, model in models.items()
        for name, weight in model.named_parameters()
        if not weight.isfinite().all()
    ]
    if bad:
        return Finding("non_finite", 0.98, {"weights": len(bad), "first": bad[0]})
    return f"every weight of {' and '.join(models)}"


def prompts_read(state: State, most: int) -> list[Completion]:
    """Prompts as completions of their own first token, so that training's own pass scores them."""
    found = []
    for place, prompt in enumerate(state.prompts[:most]):
        ids = prompt.ids[1:LONGEST_READ]
        if ids:
            first, unknown = replace(prompt, ids=prompt.ids[:1]), (0.0,) * len(ids)
            found.append(Completion(place, 0, first, ids, unknown, "length", "", reward=0.0, advantage=1.0))
    return found


def rope(parts: Parts) -> Finding | str:
    """Frequencies as built against those of the config, reference against policy, the longest row against the window.

    The calculation is ours, from the papers (models/rope_built.py): a config is only a wish.
    """
    policy, reference = parts.state.policy.causal, parts.state.reference
    try:
        check_window(policy.config, parts.lengths, "policy")
    except Refused as refusal:
        return Finding("rope_window", 0.97, {"said": str(refusal)})
    try:
        check_built(policy, "policy")
        if reference and reference.copy:
            same_rope(policy, reference.copy.causal)
            check_built(reference.copy.causal, "reference")
    except Refused as refusal:
        return Finding("rope_differs", 0.97, {"said": str(refusal)})
    return f"as the config says, in policy and reference; {parts.lengths} fits"


def reference_weights(parts: Parts) -> Finding | str:
    """Before any update a copied reference holds the policy's own numbers."""
    reference = parts.state.reference
    if reference is None or reference.copy is None:
        return ""
    if fingerprint(parts.state.policy.causal) != fingerprint(reference.copy.causal):
        return Finding(
            "reference_differs", 0.95, {"weights": "differ from those of the policy", "kind": reference.kind}
        )
    return f"{reference.kind}, weights as the policy's"


def kl_at_step_0(parts: Parts) -> Finding | str:
    """Policy and reference agree on every token before any update, so KL is 0 and nothing pulls."""
    state = parts.state
    read = prompts_read(state, 16)
    if state.reference is None or not read:
        return ""
    apart = (logps(state, read) - reference_logps(state, read)).abs()
    evidence = {"nats_apart": float(apart.mean()), "largest": float(apart.max()), "equal_below": parts.same}
    if not apart.mean() < parts.same:
        return Finding("reference_differs", 0.8, evidence)
    return f"policy and reference {float(apart.max()):.2g} nats apart at most, on {len(apart)} prompt tokens"


@torch.no_grad()
def kl_values(parts: Parts) -> Finding | str:
    """KL(p, p) = 0 by the run's estimator, and KL(p, uniform) = ln V - H(p), with hidden states 0 as the uniform one.

    sum_i p_i (ln p_i - ln 1/V) = ln V - H(p), for the V columns of the head.
    """
    state = parts.state
    read = prompts_read(state, 4)
    if state.reference is None or not read:
        return ""
    batch = passes(state, read)[0]
    exact = state.config.grpo.kl.estimator == "exact"
    found = state.engine(batch.rows, return_hidden=True)
    batch.reference = ReferenceScores(found["logps"], found["hidden"] if exact else None)
    itself = float(kl_of(state, batch, forward(state, batch)).abs().max())
    if not itself < parts.same:
        return Finding("kl_wrong", 0.9, {"kl_of_the_policy_to_itself": itself})
    if not exact:
        batch.reference = ReferenceScores(found["logps"] + FAR, None)
        if not kl_of(state, batch, forward(state, batch)).isfinite().all():
            return Finding("loss_overflow", 0.9, {"kl_not_finite_at_a_log_ratio_of": FAR})
    head = state.policy.causal.get_output_embeddings()
    if head.bias is not None:
        return f"to itself {itself:.2g}"
    uniform = state.engine(batch.rows, torch.zeros_like(found["hidden"]), head.weight.detach())
    off = float((uniform["exact_kl"] - (math.log(head.weight.shape[0]) - uniform["entropy"])).abs().max())
    if not off < parts.same:
        return Finding("kl_wrong", 0.85, {"kl_to_a_uniform_reference_off_by": off})
    return f"to itself {itself:.2g}, to a uniform reference ln V - H within {off:.2g}"


def dropout(parts: Parts) -> Finding | str:
    """Two passes over the same rows are equal, and no module would drop anything in train mode.

    Both: a new adapter's dropout shows in no number before its first update.
    """
    state = parts.state
    read = prompts_read(state, 4)
    apart = float((logps(state, read) - logps(state, read)).abs().max()) if read else 0.0
    on = list(dropping(state.engine.module))
    if apart > parts.same / 10 or on:
        evidence = {"two_passes_apart": apart, "modules": len(on), "first": on[0] if on else "none by that name"}
        return Finding("dropout", 0.98 if apart > parts.same / 10 else 0.7, evidence)
    return f"off; two passes {apart:.2g} nats apart"


def dropping(module: nn.Module) -> Iterator[str]:
    """Names of modules with a dropout above 0, in train mode."""
    for name, part in module.named_modules():
        if not part.training:
            continue
        if isinstance(part, nn.Dropout) and part.p > 0:
            yield name
        attention = part.__dict__.get("attention_dropout")
        if isinstance(attention, float) and attention > 0:
            yield name


PROBES: tuple[Callable[[Parts], Finding | str], ...] = (
    tokenizer,
    finite_weights,
    rope,
    dropout,
    reference_weights,
    kl_at_step_0,
    kl_values,
)
