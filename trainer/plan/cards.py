"""GPUs by the names of `--gpu`. Times that are computed from them are formulas, not measurements."""

from dataclasses import dataclass

GIB = 2**30

UTILISATION = 0.45
"""Of the peak arithmetic, that large matrix products of a training pass reach."""

HOST_BANDWIDTH = 100.0
"""GB/s of host memory that DeepSpeed's CPU Adam reads and writes with; a server's, not a desktop's."""


@dataclass(frozen=True)
class Card:
    name: str
    gib: float
    """What torch reports as total memory: less than the name says, since names count 10^9 and ECC takes a part."""
    tflops: float
    """Dense bf16."""
    bandwidth: float
    """GB/s of its memory."""
    link: float
    """GB/s from and to the host, one way, as copies reach it."""


CARDS = {
    card.name: card
    for card in (
        Card("a10", 22.0, 125, 600, 25),
        Card("l4", 22.0, 121, 300, 25),
        Card("rtx4090", 23.5, 165, 1008, 25),
        Card("a100-40", 39.4, 312, 1555, 25),
        Card("a100-80", 79.1, 312, 2039, 25),
        Card("h100", 79.1, 989, 3350, 50),
        Card("h200", 139.7, 989, 4800, 50),
    )
}


def card_of(gib: float) -> Card:
    """A card of which only the memory is known; its speed is taken to be an A10's."""
    return Card(f"{gib:g} GiB", gib, CARDS["a10"].tflops, CARDS["a10"].bandwidth, CARDS["a10"].link)
