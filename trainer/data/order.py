"""Which prompts a step trains on: a pure function of (seed, step), so that a resumed run has nothing to restore."""

from functools import lru_cache
from random import Random


@lru_cache(maxsize=4)
def epoch_order(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    """A permutation of range(n) for each epoch (from 0).

    Sorting by `Random.random` keys: the one sequence that Python promises never to change for a seed.
    """
    random = Random(f"{seed}/{epoch}")
    keys = [random.random() for _ in range(n)]
    return tuple(sorted(range(n), key=keys.__getitem__))


def prompts_for_step(n: int, prompts_per_step: int, step: int, seed: int) -> list[int]:
    """The rows of a step (from 0), out of `n`: the epochs in a row, cut into pieces of `prompts_per_step`.

    Each row comes once in an epoch, and no row comes twice in a step, also where a step ends one epoch and begins the
    next. Any rank computes any step by itself.

    Raises:
        ValueError: fewer rows than a step needs.
    """
    if n < prompts_per_step:
        raise ValueError(f"{n} rows do not fill a step of {prompts_per_step} prompts")
    epoch, start = divmod(step * prompts_per_step, n)
    rows = _order_without_repeats(n, prompts_per_step, seed, epoch)[start : start + prompts_per_step]
    missing = prompts_per_step - len(rows)
    if missing:
        rows += _order_without_repeats(n, prompts_per_step, seed, epoch + 1)[:missing]
    return list(rows)


def _order_without_repeats(n: int, prompts_per_step: int, seed: int, epoch: int) -> tuple[int, ...]:
    """`epoch_order`, but rows that the step across its start has already had come after that step.

    This moves rows within the first `prompts_per_step` places only. With two steps or more in an epoch the epoch's tail
    is therefore untouched, and one epoch back is far enough to know it; with fewer the moves add up from epoch 0.
    """
    first = max(epoch - 1, 0) if n >= 2 * prompts_per_step else 0
    order = epoch_order(n, seed, first)
    for later in range(first + 1, epoch + 1):
        carried = later * n % prompts_per_step
        had = set(order[n - carried :])
        order = epoch_order(n, seed, later)
        front = order[:prompts_per_step]
        head = [row for row in front if row not in had][: prompts_per_step - carried]
        order = (*head, *(row for row in front if row not in head), *order[prompts_per_step:])
    return order
