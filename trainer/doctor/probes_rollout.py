"""Probes of fresh completions: rows and masks, padding, sampling against scoring, rewards. They move no weight."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer.batch import Completion
from trainer.collect import set_advantages
from trainer.config.grpo import Rollout
from trainer.doctor.finding import Finding
from trainer.doctor.parts import Parts, differing, logps, one_pass_each
from trainer.doctor.probes_model import prompts_read
from trainer.errors import Stopped
from trainer.models.rope_built import inspect_built
from trainer.rollout.decoder import decoding
from trainer.rollout.sampling import NoiseKey, Sampler
from trainer.state import State
from trainer.update import forward, global_count, passes
from trainer.watch.garble import broken_parts
from trainer.watch.signals import garbles

LIKE_CHANCE = 0.9
"""Of ln V, from which on a mean surprise or an entropy is that of knowing nothing."""
OTHER_TEMPERATURES = torch.arange(0.2, 3.0, 0.02).tolist()
PENALTIES = (1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0)
BASES = (1e4, 1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)
"""Of RoPE in models that are about: Llama 1 and 2, ..., Llama 3, Qwen2."""
DRAWN_OTHERWISE = {torch.float32: 0.05, torch.bfloat16: 0.25}
"""Share of tokens from which on they come from another distribution. Rounding moves the edges of all slices, and small
slices lie beside each other."""


def known_text(parts: Parts) -> Finding | str:
    """Surprise at the prompts against chance, and the run's own samples as text.

    A trained model reads prompts with far less than ln V nats a token. Random weights are as unsure as they are wrong
    (entropy near ln V). A model that reads the ids of another tokenizer is sure, wrong, and writes garble; one that was
    taught answers alone is sure, wrong on prompts, and writes text.
    """
    state = parts.state
    if not (read := prompts_read(state, 16)):
        return ""
    with torch.no_grad():
        scores = [forward(state, batch) for batch in passes(state, read)]
    surprise = float(torch.cat([one.logps for one in scores]).mean().neg())
    entropy = float(torch.cat([one.entropy for one in scores]).mean())
    chance = math.log(len(state.policy.tokenizer))
    found = [broken_parts(one) for one in garbles(parts.completions, state.policy.tokenizer)]
    garbled = sum(map(bool, found)) / len(found)
    evidence: dict[str, object] = {"surprise_at_prompts": surprise, "entropy": entropy, "ln_V": chance}
    evidence |= {"garbled_samples": garbled, "example": parts.completions[0].text[:80]}
    wrong = surprise >= LIKE_CHANCE * chance
    if wrong and entropy >= LIKE_CHANCE * chance:
        return Finding("weights_not_loaded", 0.9, evidence)
    if garbled > 0.3:
        return Finding("tokenizer_mismatch" if wrong else "not_from_training", 0.85 if wrong else 0.6, evidence)
    if wrong:
        return Finding("tokenizer_mismatch", 0.4, evidence)
    return (
        f"prompts surprise it by {surprise:.2f} nats a token (chance: {chance:.2f}), {garbled:.0%} of samples garbled"
    )


def masks(parts: Parts) -> Finding | str:
    """The scored tokens are the sampled ones: each completion's ids, its end token included, and nothing else.

    Ends and lengths are set here, so that rows are padded and end with a token that also pads.
    """
    state = parts.state
    for shared in {state.shared_prompts, False}:
        one = replace(state, shared_prompts=shared)
        completions = _ragged(one, parts.completions)
        batches = [batch for batch in passes(one, completions) if batch.completions]
        targets = torch.cat([batch.rows.targets for batch in batches]).tolist()
        wanted = [token for completion in completions for token in completion.ids]
        read = torch.cat([batch.rows.attention_mask.flatten()[batch.rows.score_at] for batch in batches])
        weighed = torch.cat([batch.weights > 0 for batch in batches])
        evidence = {"scored": len(targets), "sampled": len(wanted), "on_padding": int((read == 0).sum())}
        if len(targets) > len(wanted) or not read.all():
            return Finding("kl_outside_response", 0.97, evidence)
        ends = [index for index, token in enumerate(wanted) if token == _end(state)]
        if len(targets) < len(wanted) or not weighed[ends].all():
            return Finding("end_not_trained", 0.95, evidence | {"ends": len(ends)})
        if targets != wanted or not weighed.all() or global_count(one, completions) <= 0:
            return Finding("kl_outside_response", 0.9, evidence)
    return f"{len(wanted)} sampled tokens scored, {len(ends)} ends among them, none of prompts or padding"


def _end(state: State) -> int:
    return state.decoder.stop_ids[0] if state.decoder.stop_ids else state.decoder.tokenizer.pad_token_id


def _ragged(state: State, completions: Sequence[Completion]) -> list[Completion]:
    """Of 1, 2, 3, ... tokens, the last one an end token, or twice the token that pads."""
    made = []
    for place, one in enumerate(differing(completions)):
        last = (_end(state),) if place % 2 else (state.decoder.tokenizer.pad_token_id,) * 2
        ids = one.ids[: place % 5] + last
        made.append(replace(one, ids=ids, sampling_logps=(0.0,) * len(ids), finish="stop"))
    return made


def padding(parts: Parts) -> Finding | str:
    """A completion alone in a pass, and among others of other lengths, one row each and with a shared prompt."""
    state = parts.state
    completions = _ragged(state, parts.completions)
    alone = replace(one_pass_each(state), shared_prompts=False)
    expected = logps(alone, completions)
    again = float((logps(alone, completions) - expected).abs().max())
    apart = {
        "one_row_each": float((logps(replace(state, shared_prompts=False), completions) - expected).abs().mean()),
        "as_trained": float((logps(state, completions) - expected).abs().mean()),
    }
    if not max(apart.values()) < max(parts.same, 3 * again):
        return Finding("padding_changes_scores", 0.9, {**apart, "equal_below": parts.same})
    return f"alone and in a batch {max(apart.values()):.2g} nats apart"


def groups(parts: Parts) -> Finding | str:
    """Advantages of made rewards: within a prompt they are about 0 in the mean, and the higher reward has the higher.

    The rewards of prompts lie far apart, so that one compared with another's shows.
    """
    state = parts.state
    made = [replace(one, reward=10.0 * one.group + one.generation) for one in parts.completions]
    set_advantages(state, made)
    for group in {one.group for one in made}:
        members = sorted((one for one in made if one.group == group), key=lambda one: one.generation)
        found = [one.advantage for one in members]
        if abs(sum(found)) > 1e-3 * len(found) or found != sorted(found) or found[0] >= found[-1]:
            return Finding(
                "group_layout", 0.9, {"group": group, "rewards": [one.reward for one in members], "advantages": found}
            )
    return f"of {len(made)} completions: 0 in the mean of each prompt, and in the order of the rewards"


@contextmanager
def rotated_by(causal: PreTrainedModel, base: float) -> Iterator[None]:
    """Plain RoPE of another base; other kinds stay as they are."""
    decoder = causal.get_decoder()
    plain = [decoder.get_submodule(one.module) for one in inspect_built(causal) if one.rope_type == "default"]
    before = [module.inv_freq for module in plain]
    for module, own in zip(plain, before, strict=True):
        module.inv_freq = base ** (-torch.arange(len(own), device=own.device) / len(own)).to(own)
    try:
        yield
    finally:
        for module, own in zip(plain, before, strict=True):
            module.inv_freq = own


@torch.no_grad()
def full_forward(state: State, completions: Sequence[Completion]) -> Iterator[Tensor]:
    """(tokens of the completion, V) fp32 logits of each, by the plain model without a cache."""
    with decoding(state.policy.causal), state.engine.gathered():
        for one in completions:
            ids = torch.tensor([one.prompt.ids + one.ids[:-1]], device=state.policy.causal.device)
            yield state.policy.causal(input_ids=ids, use_cache=False).logits[0, len(one.prompt.ids) - 1 :].float()


def sampling(parts: Parts) -> Finding | str:
    """Log-probs that came with the samples, decoded with a cache; those of training; and those of a plain pass.

    ln softmax(z / T) at the sampled tokens, over T: which temperature each of the first two has used.
    """
    state = parts.state
    logits = list(full_forward(state, parts.completions))
    ids = [
        torch.tensor(one.ids, device=scores.device)[:, None]
        for one, scores in zip(parts.completions, logits, strict=True)
    ]

    def at(temperature: float) -> Tensor:
        pairs = zip(logits, ids, strict=True)
        return torch.cat([(one / temperature).log_softmax(-1).gather(1, own)[:, 0] for one, own in pairs]).cpu()

    sampled = torch.tensor([logp for one in parts.completions for logp in one.sampling_logps])
    scored = logps(state, differing(parts.completions))
    gap = float((sampled - scored).abs().mean())
    evidence: dict[str, float] = {"sampled_against_scored": gap, "equal_below": parts.same}
    if gap < parts.same:
        return f"log-probs of sampler and training {gap:.2g} nats apart, decoded with a cache"
    wanted = state.config.rollout.temperature
    curve = {temperature: at(temperature) for temperature in (wanted, *OTHER_TEMPERATURES)}
    used = [min(curve, key=lambda t: float((curve[t] - which).abs().mean())) for which in (sampled, scored)]
    left = max(float((curve[t] - which).abs().mean()) for t, which in zip(used, (sampled, scored), strict=True))
    evidence |= {"sampled_at": used[0], "scored_at": used[1], "configured": wanted, "left_at_these": left}
    if used[0] != used[1] and left < 0.3 * gap:
        return Finding("temperature_mismatch", 0.95, evidence)
    for which, name in ((scored, "scored_at_rope_theta"), (sampled, "sampled_at_rope_theta")):
        by_own = float((curve[wanted] - which).abs().mean())
        if by_own < 0.3 * gap:  # it is the other one that is wrong
            continue
        base, apart = _base_of(parts, which)
        if apart < 0.1 * by_own:
            return Finding("rope_differs", 0.95, evidence | {name: base, "left_at_this": apart})
    return Finding("sampling_differs", 0.8, evidence)


def _base_of(parts: Parts, logps: Tensor) -> tuple[float, float]:
    """The RoPE base, not the model's own, by which a plain pass comes nearest to these log-probs; how near, in nats."""
    state, temperature = parts.state, parts.state.config.rollout.temperature
    apart = {0.0: math.inf}
    own = [one.theta for one in inspect_built(state.policy.causal)]
    for base in (base for base in BASES if not any(math.isclose(base, theta, rel_tol=0.01) for theta in own)):
        with rotated_by(state.policy.causal, base):
            logits = list(full_forward(state, parts.completions))
        found = [
            (scores / temperature).log_softmax(-1).gather(1, torch.tensor(one.ids, device=scores.device)[:, None])[:, 0]
            for one, scores in zip(parts.completions, logits, strict=True)
        ]
        apart[base] = float((torch.cat(found).cpu() - logps).abs().mean())
    best = min(apart, key=lambda base: apart[base])
    return best, apart[best]


def filters(parts: Parts) -> Finding | str:
    """Which tokens the same noise draws from the scored distribution itself: those of the run, or a filter is between.

    A token is the inverse CDF of one uniform (rollout/sampling.py), so it can be drawn again.
    """
    state = parts.state
    logits = list(full_forward(state, parts.completions))
    own, alike = state.config.rollout, 1 - DRAWN_OTHERWISE[state.policy.dtype]
    plain = own.model_copy(update={"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0})
    as_plain = _drawn_alike(state, parts.completions, logits, plain)
    if as_plain > alike:
        return f"{as_plain:.1%} of the tokens are those that the scored distribution draws"
    kept = _kept(state)
    candidates = {"the run's own settings": own}
    candidates |= {
        f"generation_config.json: {name} = {value}": plain.model_copy(update={name: value})
        for name, value in kept.items()
    }
    candidates |= {
        f"repetition_penalty = {one}": plain.model_copy(update={"repetition_penalty": one}) for one in PENALTIES
    }
    shares = {name: _drawn_alike(state, parts.completions, logits, one) for name, one in candidates.items()}
    best = max(shares, key=lambda name: shares[name])
    evidence: dict[str, object] = {"drawn_as_scored": as_plain, "drawn_as_configured": shares["the run's own settings"]}
    if shares[best] > alike:
        sure = 0.95 if best != "the run's own settings" else 0.8 if own.repetition_penalty != 1 else 0.5
        return Finding("filtered_sampling", sure, evidence | {"explained_by": best, "share": shares[best]})
    return Finding("filtered_sampling", 0.7, evidence | {"explained_by": "none of those tried"})


def _kept(state: State) -> dict[str, float]:
    """Sampling settings in the checkpoint's own generation_config that would filter."""
    given, neutral = state.policy.generation_config, {"repetition_penalty": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0}
    found = {name: getattr(given, name) for name in neutral}
    return {name: value for name, value in found.items() if value is not None and value != neutral[name]}


def _drawn_alike(state: State, completions: Sequence[Completion], logits: Sequence[Tensor], rollout: Rollout) -> float:
    """Share of the tokens that the sampler of ``rollout`` draws from these logits, with the noise of these samples."""
    sampler = Sampler(rollout, tokenizer_size=len(state.decoder.tokenizer), dtype=state.policy.dtype)
    same = total = 0
    for one, scores in zip(completions, logits, strict=True):
        noise = NoiseKey(state.decoder.seed, "train", 0, one.prompt.index, one.generation).uniforms(len(one.ids))
        for place, token in enumerate(one.ids):
            context = torch.tensor([one.prompt.ids + one.ids[:place]], device=scores.device)
            uniform = torch.tensor(noise[place : place + 1], device=scores.device)
            drawn, _ = sampler(scores[place : place + 1].clone(), uniform, context, position=place)
            same, total = same + (int(drawn) == token), total + 1
    return same / total


def rewards(parts: Parts) -> Finding | str:
    """The run's rewards on these completions: numbers, for most of them, that are not all the same."""
    completions = [replace(one, rewards={}) for one in parts.completions]
    try:
        messages = parts.state.rewards.score(completions, 0).messages
    except Stopped as stop:
        return Finding("reward_fails", 0.9, {"said": str(stop)})
    scored = [one.reward for one in completions if one.reward is not None]
    unscored = 1 - len(scored) / len(completions)
    if unscored > 0.2:
        evidence = {"unscored_fraction": unscored, "said": "; ".join(messages)[:300]}
        return Finding("unscored", 0.5 + unscored / 2, evidence)
    if len(set(scored)) == 1:
        # Of a hard task all samples may fail alike; of these few it is no more than a sign.
        return Finding("reward_constant", 0.55, {"completions": len(scored), "reward": scored[0]})
    return f"{len(set(scored))} different numbers on {len(scored)} completions, {unscored:.0%} unscored"


PROBES: tuple[Callable[[Parts], Finding | str], ...] = (padding, groups, sampling, filters, rewards)
"""After ``known_text`` and ``masks``: they compare token with token, so what is scored has to be what was sampled."""
