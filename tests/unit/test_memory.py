"""Peak memory on a CPU: exact on a computation whose peak is known, and it starts anew at each reading."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from trainer.record.memory import PeakMemory

MIB = 2**20


def test_the_peak_is_that_of_what_lived_at_once() -> None:
    with PeakMemory(torch.device("cpu")) as memory:
        base = memory.take_peak()
        kept = torch.zeros(MIB // 4)
        for _ in range(3):
            passing = torch.ones(2 * MIB // 4)  # one at a time, though three are made
            del passing
        assert memory.take_peak() - base == 3 * MIB
        assert memory.take_peak() - base == MIB
        view = kept[:10]  # no memory of its own
        assert memory.take_peak() - base == MIB
        del kept, view
        memory.take_peak()
        assert memory.take_peak() == base


def test_what_the_backward_pass_holds_counts() -> None:
    weight = torch.zeros(MIB // 4, requires_grad=True)
    with PeakMemory(torch.device("cpu")) as memory:
        base = memory.take_peak()
        (weight.exp() * 2.0).sum().backward()
        # The saved exponential, and the gradients on their way: at least three times the weight.
        assert 3 * MIB <= memory.take_peak() - base <= 6 * MIB
        assert memory.take_peak() - base >= MIB  # weight.grad stays


def test_what_is_not_counted_is_neither_in_the_peak_nor_in_what_follows() -> None:
    with PeakMemory(torch.device("cpu")) as memory:
        kept = torch.zeros(MIB)
        base = memory.take_peak()
        with memory.uncounted():
            del kept
            torch.ones(8 * MIB)
        assert memory.take_peak() == base  # what was held when the measurement began
        assert memory.take_peak() == base - 4 * MIB
        torch.ones(MIB // 2)
        assert memory.take_peak() == base - 2 * MIB


def test_another_mode_on_top_is_left_alone() -> None:
    """One that counts FLOPs, say: then everything is counted."""
    with PeakMemory(torch.device("cpu")) as memory, FlopCounterMode(display=False) as flops:
        base = memory.take_peak()
        with memory.uncounted():
            torch.ones(512, 512) @ torch.ones(512, 512)
        assert flops.get_total_flops() == 2 * 512**3
        assert memory.take_peak() - base == 3 * MIB
