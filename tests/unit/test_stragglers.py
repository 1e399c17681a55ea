"""Who keeps the others waiting."""

from trainer.watch.stragglers import Stragglers

HOSTS = ["a", "a", "b", "b"]


def looked(*steps: list[float], whole: float = 2.0) -> list[tuple[float, list[str]]]:
    stragglers = Stragglers()
    return [stragglers.look(n, [{"rollout": one} for one in s], HOSTS, whole) for n, s in enumerate(steps, start=1)]


def test_three_times_in_a_row_and_told_once() -> None:
    found = looked(*[[1.0, 1.1, 0.9, 2.0]] * 5)
    assert [len(notes) for _, notes in found] == [0, 0, 1, 0, 0]
    assert [ratio for ratio, _ in found] == [2.0] * 5
    assert found[2][1][0].startswith(
        "rank 3 (host b) is slow: in step 3, the 3. in a row, its rollout took 2.00 s, 2.0 "
    )


def test_another_rank_each_time_is_chance() -> None:
    slow = [[2.0 if rank == step % 4 else 1.0 for rank in range(4)] for step in range(12)]
    assert [notes for _, notes in looked(*slow) if notes] == []


def test_a_little_and_what_does_not_matter_is_left_alone() -> None:
    assert all(notes == [] for _, notes in looked(*[[1.0, 1.0, 1.0, 1.4]] * 6))
    assert looked(*[[0.01, 0.01, 0.01, 0.1]] * 6) == [(1.0, [])] * 6


def test_two_ranks_and_a_rank_without_work() -> None:
    stragglers = Stragglers()
    for step in (1, 2, 3):
        ratio, notes = stragglers.look(step, [{"reward": 1.0}, {"reward": 0.2}], HOSTS[1:3], 1.5)
    assert ratio == 5.0 and notes[0].startswith("rank 0 (host a)")
    assert stragglers.look(4, [{"reward": 1.0}, {}], HOSTS[1:3], 1.5) == (1.0, [])
