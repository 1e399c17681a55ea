"""F24: kill -9 after the rewards of a step came and before its update: the resumed run pays for none of them again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch import Rank, run_ranks
from tests.dist.paid import JUDGE
from tests.tiny_run import RUN_FILE, write_run

STEPS, KILLED_IN = 5, 4
ADAPTER = "adapter/adapter_model.safetensors"


@pytest.mark.full
def test_f24_kill_9_between_rewards_and_update_repeats_no_paid_call(
    tmp_path: Path, results: Callable[[str, dict[str, Any]], None]
) -> None:
    """The newest checkpoint is two steps old, so that a whole step before the killed one is done again as well."""
    write_run(tmp_path)
    with (tmp_path / "rewards.py").open("a") as file:
        file.write(JUDGE)
    judge = '[[reward]]\nname = "judge"\nkind = "python"\nfunction = "rewards.py:judge"\n'
    (tmp_path / "run.toml").write_text(RUN_FILE.replace("steps = 2", f"steps = {STEPS}") + judge)

    def start(step: int, *words: str) -> list[Rank]:
        worker = str(Path(__file__).with_name("paid.py"))
        command = [worker, str(step), "train", "run.toml", "--checkpoint.every", "2", *words]
        return run_ranks(command, 2, 29761, folder=tmp_path)

    def asked() -> list[str]:
        """Of steps that train; the probe before the first one is no part of them."""
        lines = [line for rank in range(2) for line in (tmp_path / f"asked.{rank}").read_text().split("\n") if line]
        for rank in range(2):
            (tmp_path / f"asked.{rank}").unlink()
        return sorted(line for line in lines if not line.startswith("1 "))

    unharmed = start(0, "--run.dir", "unharmed")
    assert [rank.code for rank in unharmed] == [0, 0], unharmed[0].output[-3000:]
    wanted = asked()
    assert len(wanted) == 16 * (STEPS - 1)

    killed = start(KILLED_IN, "--run.dir", "out")
    assert killed[1].code == -9 and killed[0].code == 4, killed[0].output[-3000:]
    paid = asked()
    assert paid == [line for line in wanted if line[0] in "234"]

    resumed = start(0, "--run.dir", "out", "--resume", "auto")
    assert [rank.code for rank in resumed] == [0, 0], resumed[0].output[-3000:]
    assert "after step 2\n" in resumed[0].output
    again = asked()
    repeated = [line for line in again if line in paid]
    assert sorted(paid + again) == wanted
    for name in (ADAPTER, *(f"rollouts/step-{step:06d}.jsonl" for step in range(1, STEPS + 1))):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "unharmed" / name).read_bytes(), name
    results("paid", {"calls of the unharmed run": len(wanted), "repeated calls": len(repeated), "ranks": 2})
