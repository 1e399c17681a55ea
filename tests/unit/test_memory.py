"""Peak memory on a CPU: exact on a computation whose peak is known, and it starts anew at each reading."""

import torch

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
