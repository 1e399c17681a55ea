"""Seconds of a step, by formulas, as far as the settings that memory depends on change them. Nothing is measured."""

from trainer.plan import state
from trainer.plan.cards import HOST_BANDWIDTH, UTILISATION, Card
from trainer.plan.choose import cost, reads
from trainer.plan.settings import Settings

GB = 1e9
CPU_ADAM = 28
"""Bytes of host memory a parameter: gradient, master weight and two moments read, three of them written."""
DEQUANTISED = 4.5
"""Bytes of card memory a 4-bit weight and pass: half a byte read, two written, two read again."""


def seconds(settings: Settings, card: Card) -> dict[str, float]:
    """By what takes them. W: weights, t: trained ones, n: ranks; a pass reads the weights forward, backward, and once
    more where it recomputes."""
    shape, e, n, zero = settings.shape, settings.itemsize, settings.ranks, settings.zero
    passes, _ = settings.passes()
    times = passes * reads(settings)
    whole, share = state.whole_weights(settings), settings.trained / n
    link = card.link * GB
    found = {
        # 2 operations a weight and token of a forward pass
        "training passes": 2 * shape.block_weights * cost(settings) / (UTILISATION * card.tflops * 1e12),
    }
    if zero.stage == 3:
        found["gathering weights"] = (times + 1) * whole * (n - 1) / n / link
        if zero.offload_parameters:
            found["weights from the host"] = (times + 1) * whole / n / link
    if state.on_host(settings):
        found["optimizer on the host"] = (4 + e) * share / link + CPU_ADAM * share / (HOST_BANDWIDTH * GB)
    if settings.rests:
        found["optimizer to the host and back"] = 2 * state.resting(settings) / link
    if settings.reference == "streamed":
        found["reference from the host"] = e * shape.total / link
    if settings.bits:
        found["dequantising"] = times * DEQUANTISED * shape.block_weights / (card.bandwidth * GB)
    return found


def price(before: Settings, after: Settings, card: Card) -> tuple[float, str]:
    """Seconds more that a step takes, and what takes them."""
    old, new = seconds(before, card), seconds(after, card)
    more = {name: new.get(name, 0.0) - old.get(name, 0.0) for name in new | old}
    told = ", ".join(f"{name} {value:+.2f} s" for name, value in more.items() if abs(value) >= 0.005)
    return sum(more.values()), told or "no time"
