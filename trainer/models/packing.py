"""Completions -> the rows of one forward pass. The only place that knows the layout: one completion a row."""

from collections.abc import Iterable, Sequence

import torch

from trainer.batch import Completion, PackedRows


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
    rows = PackedRows(
        input_ids=torch.tensor([list(s) + [pad_id] * (length - len(s)) for s in sequences]),
        attention_mask=real.long(),
        position_ids=torch.minimum(columns, lengths[:, None] - 1),
        score_at=torch.tensor(score_at),
        targets=torch.tensor([token for completion in completions for token in completion.ids]),
        completion=torch.repeat_interleave(torch.tensor([len(completion.ids) for completion in completions])),
    )
    return PackedRows(*(tensor.to(device) for tensor in rows))


def filler(*, token_id: int, device: torch.device) -> PackedRows:
    """The smallest pass: two tokens, one of them scored. Its weight is 0; it keeps ranks at equal numbers of passes."""
    one = torch.ones(1, 1, dtype=torch.long, device=device)
    zero = torch.zeros(1, dtype=torch.long, device=device)
    return PackedRows(one * token_id, one, one * 0, zero, zero + token_id, zero)


def micro_batches(
    completions: Sequence[Completion], *, micro_batch: int, token_budget: int
) -> Iterable[list[Completion]]:
    """Cuts completions, in order, into passes of ``micro_batch`` completions, or of at most ``token_budget`` padded
    tokens."""
    batch: list[Completion] = []
    longest = 0
    for completion in completions:
        length = len(completion.prompt.ids) + len(completion.ids) - 1
        full = len(batch) == micro_batch if micro_batch else max(longest, length) * (len(batch) + 1) > token_budget
        if batch and full:
            yield batch
            batch, longest = [], 0
        batch.append(completion)
        longest = max(longest, length)
    if batch:
        yield batch
