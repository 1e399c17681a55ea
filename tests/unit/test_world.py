"""What ranks say when they end together."""

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch

from trainer.errors import NoCheckpoint, Refused, RunEnd
from trainer.world import World


@dataclass(frozen=True)
class Told(World):
    """A world whose other ranks have told these (report, host) pairs."""

    others: tuple[Any, ...] = ()

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, *self.others]


def ended(own: RunEnd | None, *others: tuple[Any, str]) -> pytest.ExceptionInfo[RunEnd]:
    world = Told(0, 1 + len(others), 0, torch.device("cpu"), others)
    with patch("trainer.world.socket.gethostname", lambda: "hosta"), pytest.raises(RunEnd) as end:
        world.agree(own)
    return end


def test_every_rank_ends_with_the_lowest_rank_s_message() -> None:
    end = ended(None, ((NoCheckpoint, "one"), "hosta"), ((Refused, "two"), "hosta"))
    assert (end.type, str(end.value)) == (NoCheckpoint, "one")


def test_a_host_that_alone_met_the_mistake_is_named() -> None:
    assert str(ended(None, ((Refused, "no such folder"), "hostb")).value) == "no such folder\n(on hostb alone)"
    assert str(ended(Refused("bad"), ((Refused, "bad"), "hostb")).value) == "bad"
