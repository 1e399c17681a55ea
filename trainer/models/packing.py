"""Completions -> the rows of one forward pass. The only place that knows the layout: whole groups in one row, the
prompt once, or one completion a row where the architecture needs that."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import torch

from trainer.batch import Completion, PackedRows


def pack_groups(completions: Sequence[Completion], *, device: torch.device) -> PackedRows:
    """One row without padding: of each group the prompt, then each ``completion[:-1]``, positions going on from the
    prompt.

    Completions of a group lie side by side. The prompt's last state predicts the first token of each of them.
    """
    ids: list[int] = []
    positions: list[int] = []
    score_at: list[int] = []
    groups = []
    for prompt, members in by_prompt(completions):
        ids += prompt
        positions += range(len(prompt))
        last = len(ids) - 1
        for completion in members:
            own = completion.ids[:-1]
            score_at += [last, *range(len(ids), len(ids) + len(own))]
            ids += own
            positions += range(len(prompt), len(prompt) + len(own))
        groups.append((len(prompt), tuple(len(completion.ids) - 1 for completion in members)))
    return PackedRows(
        input_ids=torch.tensor([ids], device=device),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=device),
        position_ids=torch.tensor([positions], device=device),
        score_at=torch.tensor(score_at, device=device),
        targets=_targets(completions, device),
        completion=_owners(completions, device),
        groups=tuple(groups),
    )


def by_prompt(completions: Iterable[Completion]) -> Iterator[tuple[tuple[int, ...], list[Completion]]]:
    """Neighbours of one group and prompt."""
    for (_, prompt), members in groupby(completions, key=_of):
        yield prompt, list(members)


def _of(completion: Completion) -> tuple[int, tuple[int, ...]]:
    return completion.group, completion.prompt.ids


def pack(completions: Sequence[Completion], *, pad_id: int, device: torch.device) -> PackedRows:
    """Rows ``prompt + completion[:-1]``, right-padded: the last token predicts nothing that is scored.

    Every completion token is scored, by the hidden state one position before it; prompt and padding never are.
    """
    sequences = [completion.prompt.ids + completion.ids[:-1] for completion in completions]
    length = max(len(sequence) for sequence in sequences)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    columns = torch.arange(length)
    real = columns < lengths[:, None]
    score_at = [
        row * length + position
        for row, completion in enumerate(completions)
        for position in range(len(completion.prompt.ids) - 1, len(sequences[row]))
    ]
    return PackedRows(
        input_ids=torch.tensor([list(s) + [pad_id] * (length - len(s)) for s in sequences], device=device),
        attention_mask=real.long().to(device),
        position_ids=torch.minimum(columns, lengths[:, None] - 1).to(device),
        score_at=torch.tensor(score_at, device=device),
        targets=_targets(completions, device),
        completion=_owners(completions, device),
    )


def _targets(completions: Sequence[Completion], device: torch.device) -> torch.Tensor:
    return torch.tensor([token for completion in completions for token in completion.ids], device=device)


def _owners(completions: Sequence[Completion], device: torch.device) -> torch.Tensor:
    return torch.repeat_interleave(torch.tensor([len(completion.ids) for completion in completions])).to(device)


def filler(*, token_id: int, device: torch.device) -> PackedRows:
    """The smallest pass: two tokens, one of them scored. Its weight is 0; it keeps ranks at equal numbers of passes."""
    one = torch.ones(1, 1, dtype=torch.long, device=device)
    zero = torch.zeros(1, dtype=torch.long, device=device)
    return PackedRows(one * token_id, one, one * 0, zero, zero + token_id, zero)


def micro_batches(
    completions: Sequence[Completion], *, micro_batch: int, token_budget: int, shared: bool
) -> Iterable[list[Completion]]:
    """Cuts completions, in order, into passes of ``micro_batch`` completions, or of at most ``token_budget`` tokens.

    A group that a cut goes through has its prompt in both passes, which changes the cost and not the sum.
    """
    batch: list[Completion] = []
    tokens = longest = 0
    for completion in completions:
        prompt, own = len(completion.prompt.ids), len(completion.ids) - 1
        same = bool(batch) and _of(batch[-1]) == _of(completion)
        alone = prompt + own
        longest = max(longest, alone)
        tokens = tokens + (own if same else alone) if shared else longest * (len(batch) + 1)
        if batch and (len(batch) == micro_batch if micro_batch else tokens > token_budget):
            yield batch
            batch, tokens, longest = [], alone, alone
        batch.append(completion)
    if batch:
        yield batch


def tokens_of(completions: Sequence[Completion], shared: bool) -> int:
    """Tokens of the pass over these completions, padding included."""
    if shared:
        return sum(len(prompt) + sum(len(one.ids) - 1 for one in members) for prompt, members in by_prompt(completions))
    return len(completions) * max(len(one.prompt.ids) + len(one.ids) - 1 for one in completions)
