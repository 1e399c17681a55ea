"""What a pass keeps for its backward pass, and holds beyond that at its fullest moments.

Derived from the blocks of transformers' Llama, Qwen2 and Qwen3 as models/shared_prefix.py and models/head.py run them,
and counted storage by storage in tests/unit/test_plan_fake.py. Below, e is the bytes of an element, H the hidden size,
I the intermediate, A and K the elements of a token's queries and keys, T the tokens of the pass, N those scored.
"""

from trainer.plan.settings import Pass, Settings

CHUNK_ROWS = 256
"""models/head.py; tests/unit/test_plan.py compares the two."""
CHUNK_COPIES = {False: 2, True: 3}
"""Likewise: fp32 copies of a chunk, without and with the exact KL."""


def block(settings: Settings, one: Pass) -> float:
    """Kept of one block.

    A norm keeps its input in fp32 and a factor a token, and in full fine-tuning what its weight multiplies: 4H + 4
    (+ eH). A linear layer keeps its input where it, or its adapter, is trained. SiLU keeps its input (eI), the product
    of the MLP both factors (2eI). Attention keeps Q, K, V, its output and an fp32 log-sum-exp a head; the output is
    copied once more where completions are put together.
    """
    shape, e, tokens = settings.shape, settings.itemsize, one.tokens
    full = not settings.rank
    norms = 2 * (4 * shape.hidden + 4 + (e * shape.hidden if full else 0))
    if shape.qk_norm:
        each = shape.queries + shape.keys
        norms += 4 * each + 4 * (shape.heads + shape.kv_heads) + (e * each if full else 0)
    attention = e * 2 * shape.queries + 4 * shape.heads
    if settings.shared and "o_proj" in _trained(settings):
        attention += e * shape.queries
    mlp = e * 3 * shape.intermediate
    a_token = norms + attention + mlp + _inputs(settings)
    return tokens * a_token + _keys(settings, one) + (_masks(settings, one) if settings.cuda else 0)


def _trained(settings: Settings) -> frozenset[str]:
    """Linear layers that keep their input."""
    return settings.targets if settings.rank else frozenset(settings.shape.linears)


def _inputs(settings: Settings) -> float:
    """Of the linear layers, a token; those that read the same share it. An adapter keeps r elements more. The input of
    o_proj is the attention's output where that is not copied."""
    trained, shape, e = _trained(settings), settings.shape, settings.itemsize
    kept = 0
    if trained & {"q_proj", "k_proj", "v_proj"}:
        kept += shape.hidden
    if trained & {"gate_proj", "up_proj"}:
        kept += shape.hidden
    if "down_proj" in trained:
        kept += shape.intermediate
    return e * (kept + settings.rank * len(settings.targets))


def _keys(settings: Settings, one: Pass) -> float:
    """K and V. Each completion of a shared prompt has a copy of what it sees. A card's kernels take a mask only with
    keys for every head."""
    shape = settings.shape
    keys = shape.queries if settings.cuda else shape.keys
    return 2 * settings.itemsize * keys * (one.tokens + one.copied)


def _masks(settings: Settings, one: Pass) -> float:
    """In the dtype of the queries. On a card each layer keeps a copy of its own, since rows are not aligned."""
    return settings.itemsize * one.seen


def blocks(settings: Settings, one: Pass) -> float:
    """Kept at the end of the forward pass. With checkpointing, each block's input alone."""
    if settings.checkpointing:
        return settings.shape.layers * settings.itemsize * settings.shape.hidden * one.tokens
    return settings.shape.layers * block(settings, one)


def around(settings: Settings, one: Pass) -> float:
    """Kept outside of the blocks: sine and cosine, masks on a CPU, the last norm.

    With frozen embeddings the first norm keeps nothing, which makes up for the last.
    """
    shape, e = settings.shape, settings.itemsize
    a_token = 2 * e * shape.head_dim
    if not settings.rank:
        a_token += (4 + e) * shape.hidden
    elif settings.checkpointing:
        a_token += 4 * shape.hidden
    return one.tokens * a_token + (0 if settings.cuda else _masks(settings, one))


def chunks(settings: Settings, one: Pass) -> float:
    """Logits of a chunk of rows in fp32, and what is made of them."""
    return CHUNK_COPIES[settings.exact] * 4.0 * settings.shape.vocab * min(one.scored, CHUNK_ROWS)


def head(settings: Settings, one: Pass) -> float:
    """At its fullest, beside the chunks: (N, H) states, and gradients of them. A trained head sums its own gradient in
    fp32, and in bf16 makes each chunk's product, and at the end the whole, once more in bf16."""
    shape, e = settings.shape, settings.itemsize
    states = e * shape.hidden * one.scored * (3 if settings.exact else 2)
    if settings.rank:
        return states + e * shape.hidden * one.tokens  # the forward pass: all last states are still there
    return states + shape.matrix * (4 + (e if e == 2 else 0))


def in_flight(settings: Settings, one: Pass) -> float:
    """Gradients between layers at the fullest moment of the backward pass.

    In the last MLP: three gradients of I elements a token while one input is free already, and one of H: 2eI + eH. Or
    in the last norm, in fp32: 24H. With checkpointing the former, beside one block run again. A 4-bit weight is written
    out before the third gradient is there. A tied head's gradient waits for the embedding's.
    """
    shape, e = settings.shape, settings.itemsize
    mlp = one.tokens * e * (2 * shape.intermediate + shape.hidden)
    if settings.bits:
        mlp = max(mlp, mlp + e * shape.intermediate * (shape.hidden - one.tokens))
    waiting = e * shape.matrix if shape.tied and not settings.rank else 0
    if settings.checkpointing:
        return block(settings, one) + mlp + waiting
    return max(mlp, one.tokens * 24 * shape.hidden) + waiting


def embedding(settings: Settings, one: Pass) -> float:
    """Gradient of a trained embedding at the end of the backward pass; where it is tied, the head's and their sum."""
    if settings.rank:
        return 0.0
    shape = settings.shape
    return settings.itemsize * (shape.matrix * (3 if shape.tied else 1) + 2 * shape.hidden * one.tokens)


def without_backward(settings: Settings, tokens: int) -> float:
    """Of a pass that keeps nothing: three MLP activations (an adapter: four) and two of H, at the widest place."""
    shape, e = settings.shape, settings.itemsize
    wide = 4 if settings.targets & {"gate_proj", "up_proj"} else 3
    dequantised = e * shape.hidden * shape.intermediate if settings.bits else 0
    return tokens * e * (wide * shape.intermediate + 2 * shape.hidden + 2 * shape.head_dim) + dequantised
