"""What all ranks are compared by: the bits of their weights, and the seconds of their work."""

import socket

from trainer.errors import Stopped
from trainer.measure import Stopwatch
from trainer.models.checksum import checksums, unlike
from trainer.record.metrics import Sums
from trainer.state import State


def compare_weights(state: State) -> None:
    """Stopped where the ranks hold other bits of a weight, with nothing to save. A collective."""
    found = state.world.gather_objects((socket.gethostname(), checksums(state.policy.causal)))
    if not (odd := unlike([sums for _, sums in found])):
        return
    state.boundary = None
    name, ranks = next(iter(odd.items()))
    who = ", ".join(f"{rank} (host {found[rank][0]})" for rank in ranks)
    more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
    raise Stopped(
        f"step {state.step}: the ranks' weights are not the same: {name}{more}, on rank {who}"
        f"{', of which one is wrong' if len(ranks) == state.world.size else ''}. Nothing of it is saved. A bit has "
        "flipped in memory, or the ranks have computed apart. Fix: --resume auto goes on from the newest checkpoint; "
        "if it comes again on the same host, test its memory, or take it out."
    )


def compare_seconds(state: State, clock: Stopwatch, sums: Sums) -> None:
    """Notes who keeps the others waiting. A collective."""
    if state.world.size == 1:
        return
    found = state.world.gather_objects((socket.gethostname(), clock.own))
    hosts, seconds = [host for host, _ in found], [own for _, own in found]
    ratio, notes = state.stragglers.look(state.step + 1, seconds, hosts, sum(clock.seconds.values()))
    sums.maximum("slowest_rank_ratio", ratio)
    state.notes += notes
