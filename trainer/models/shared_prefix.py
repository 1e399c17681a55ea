"""Attention of packed groups: the prompt once, then its completions, each of which sees the prompt and its own past.

Causal masking makes a prompt's states independent of what follows, so states, log-probs and gradients are those of one
row a completion, at (P + sum C) tokens a group instead of (G P + sum C): Prefix Grouper, arXiv 2506.05433.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from trainer.batch import Completion, Groups, PackedRows, Prompt
from trainer.models import flex_groups
from trainer.models.packing import pack, pack_groups
from trainer.models.prefix_cache import PrefixCache

NAME, FLEX = "sdpa_shared_prefix", "flex_shared_prefix"
"""The same attention, which takes packed groups by one way or the other."""

FLEX_DEVICE = "cuda"
"""On a CPU FlexAttention has no gradient."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    groups: Groups = (),
    masks: Mapping[tuple[int, int], Tensor] | BlockMask | None = None,
    prefix_cache: PrefixCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """(1, heads, L, head dim) of one packed row -> (1, L, heads, head dim); with a cache, decoding on it. Without
    either it is plain SDPA."""
    if prefix_cache is not None:
        layer = cast(int, module.layer_idx)
        if not groups:
            return prefix_cache.attend(layer, query, key, value, kwargs.get("scaling")), None
        prefix_cache.store_prompts(layer, key, value)
    if not groups or masks is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if isinstance(masks, BlockMask):
        return flex_groups.attend(query, key, value, masks, kwargs.get("scaling")).transpose(1, 2), None
    # The fused kernels of a card take a mask or unequal numbers of heads, not both.
    cpu = query.device.type == "cpu"
    if not cpu:
        key, value = (repeat_kv(part, query.shape[1] // key.shape[1]) for part in (key, value))
    # Split, not sliced: each slice of a row would give back a gradient of the whole row.
    sizes = [size for prompt, own in groups for size in (prompt, *filter(None, own))]
    parts = zip(*(part.split(sizes, 2) for part in (query, key, value)), strict=True)
    attend = partial(scaled_dot_product_attention, scale=kwargs.get("scaling"), enable_gqa=cpu)
    attended = []
    for _, own in groups:
        queries, prompt_keys, prompt_values = next(parts)
        attended.append(attend(queries, prompt_keys, prompt_values, is_causal=True))
        for length in filter(None, own):
            queries, keys, values = next(parts)
            keys, values = torch.cat((prompt_keys, keys), 2), torch.cat((prompt_values, values), 2)
            attended.append(attend(queries, keys, values, attn_mask=masks[prompt_keys.shape[2], length]))
    return torch.cat(attended, 2).transpose(1, 2), None


def hidden_states(
    causal: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    groups: Groups = (),
    prefix_cache: PrefixCache | None = None,
) -> Tensor:
    """(R, L) token ids -> (R, L, H), the last states before the head. A model that does not share prompts sees neither
    groups nor cache."""
    decoder = causal.get_decoder()
    further = layout(groups, decoder.config, causal.dtype, input_ids.device)
    if prefix_cache is not None:
        further["prefix_cache"] = prefix_cache
    # A tuple: ZeRO-3's backward hooks do not look inside a dataclass.
    (hidden, *_) = decoder(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        use_cache=False,
        return_dict=False,
        **further,
    )
    return hidden


def layout(groups: Groups, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """What tells the attention how a row is packed; nothing of a row that is one sequence."""
    if not groups:
        return {}
    # A row of one block is a shape of its own to a compiler, and SDPA takes few calls for it.
    flex = config._attn_implementation == FLEX and sum(prompt + sum(own) for prompt, own in groups) > flex_groups.BLOCK
    return {
        "groups": groups,
        "masks": flex_groups.block_mask(groups, device) if flex else _masks(groups, dtype, device),
    }


def _masks(groups: Groups, dtype: torch.dtype, device: torch.device) -> dict[tuple[int, int], Tensor]:
    """By lengths of prompt and completion: 0 on all of the prompt and the own past, -inf beyond. One for all layers:
    each keeps for its backward pass what it was given, and a copy where that has another dtype than its queries."""
    found = {}
    for prompt, lengths in groups:
        for length in set(filter(None, lengths)):
            beyond = torch.full((length, prompt + length), -torch.inf, dtype=dtype, device=device)
            found[prompt, length] = beyond.triu(prompt + 1)[None, None]
    return found


def share_prompts(causal: PreTrainedModel) -> str:
    """Makes the model ready for packed groups and decoding on prompts; the reason, in words, where its architecture is
    not."""
    config = causal.config.get_text_config(decoder=True)
    if config._attn_implementation != "sdpa":
        return f'model.attn = "{config._attn_implementation}"; prompts are shared with "sdpa"'
    if not sees_whole_context(config):
        return f"layers of {type(causal).__name__} do not see the whole context"
    causal.set_attn_implementation(NAME)
    if _shares(causal):
        return ""
    causal.set_attn_implementation("sdpa")
    return f"{type(causal).__name__} computes its attention by a way of its own"


def sees_whole_context(config: PretrainedConfig) -> bool:
    """Every layer of a model of this config attends to all that came before."""
    facts = config.get_text_config(decoder=True).to_dict()
    return not facts.get("sliding_window") and not set(facts.get("layer_types") or ()) - {"full_attention"}


def use_flex(causal: PreTrainedModel) -> str:
    """Has the packed groups of a model that shares its prompts attend by FlexAttention, where its device has it and it
    gives what SDPA gives. What to say of it; nothing where it is not tried."""
    if causal.device.type != FLEX_DEVICE:
        return ""
    try:
        apart = _flex_apart(causal)
        causal.set_attn_implementation(FLEX)
        if apart < (1e-3 if causal.dtype == torch.float32 else 3e-2) and _shares(causal, (2, 3, 4, 5, 6, 7) * 30):
            return f"packed groups attend by FlexAttention; its states and gradients are within {apart:.0e} of SDPA's"
        why = f"its states or gradients are {apart:.0e} from SDPA's"
    except Exception as error:  # the compiler, Triton and the driver each raise kinds of their own
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    causal.set_attn_implementation(NAME)
    return f"packed groups attend by SDPA, one completion after the other, since FlexAttention fails here: {why}"


def _flex_apart(causal: PreTrainedModel) -> float:
    """The largest relative distance of states and of gradients between both ways, on noise in the shape of the model's
    own attention. Two lengths, so that what is compiled is for any."""
    config = causal.config.get_text_config(decoder=True).to_dict()
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or config["hidden_size"] // heads
    draw = torch.Generator(causal.device).manual_seed(0)
    apart = 0.0
    for groups in (((290, (90, 1, 170)), (40, (60, 0, 60))), ((200, (100, 37)),)):
        length = sum(prompt + sum(own) for prompt, own in groups)
        noise = [
            torch.randn(1, length, size, width, device=causal.device, generator=draw).to(causal.dtype)
            for size in (heads, kv_heads, kv_heads, heads)
        ]
        found = []
        for masks in (_masks(groups, causal.dtype, causal.device), flex_groups.block_mask(groups, causal.device)):
            inputs = [part.transpose(1, 2).detach().requires_grad_() for part in noise[:3]]
            query, key, value = inputs
            states, _ = attention(causal, query, key, value, None, groups=groups, masks=masks)
            found.append([states.detach(), *torch.autograd.grad(states, inputs, noise[3])])
            # Adapters on the values alone: in the first layer nothing else has a gradient, which is another program.
            states, _ = attention(causal, query.detach(), key.detach(), value, None, groups=groups, masks=masks)
            found[-1] += torch.autograd.grad(states, value, noise[3])
        apart = max(apart, *map(_apart, *found))
    return apart


@torch.no_grad()
def _shares(causal: PreTrainedModel, prompt_ids: tuple[int, ...] = (2, 3, 4, 5, 6, 7)) -> bool:
    """Whether packed states are those of one row a completion, and those of the second completion stay what they are
    with another first one."""
    prompt = Prompt(0, "", prompt_ids, None, {})

    def group(*first: int) -> list[Completion]:
        texts = enumerate((first, (9, 8, 7, 6)))
        return [Completion(0, place, prompt, ids, (0.0,) * len(ids), "stop", "") for place, ids in texts]

    device, one, other = causal.device, group(2, 4, 6), group(3, 5, 7)
    try:
        plain, packed, changed = (
            _states(causal, rows)
            for rows in (pack(one, pad_id=0, device=device), *(pack_groups(g, device=device) for g in (one, other)))
        )
    except (AttributeError, TypeError, ValueError):  # layers that take no further arguments, or have no number
        return False
    exact = causal.dtype == torch.float32
    second = slice(3, None)
    return _apart(plain, packed) < (1e-3 if exact else 0.1) and _apart(packed[second], changed[second]) < (
        1e-5 if exact else 5e-3
    )


def _states(causal: PreTrainedModel, rows: PackedRows) -> Tensor:
    hidden = hidden_states(causal, rows.input_ids, rows.attention_mask, rows.position_ids, rows.groups)
    return hidden.flatten(0, 1)[rows.score_at]


def _apart(expected: Tensor, got: Tensor) -> float:
    """Relative L2 distance."""
    return float((expected - got).double().norm() / expected.double().norm())


for _name in (NAME, FLEX):
    AttentionInterface.register(_name, attention)
    AttentionMaskInterface.register(_name, sdpa_mask)
