"""``python -m trainer`` with the reward "judge" in the place of a service, and an end of its own.

    paid.py STEP train RUN.toml ...

Rank 1 is killed in that step, when its rewards have come and no weight has moved; with STEP 0 nobody is.
"""

import os
import signal
import sys
from dataclasses import replace
from typing import Any

import trainer.train
from trainer.__main__ import main
from trainer.config.grpo import Reward
from trainer.interrupts import leave
from trainer.rewards.runtime import RewardRuntime
from trainer.state import State

JUDGE = """

async def judge(completion_ids, trainer_state, **_):
    import os
    with open(f"asked.{os.environ['RANK']}", "a") as file:
        print(trainer_state.global_step + 1, completion_ids[0], file=file)
    return [sum(ids) % 7 / 7 for ids in completion_ids]
"""


def run(step: int, arguments: list[str]) -> int:
    resolve, next_phase = RewardRuntime._resolve, trainer.train.kl_in_reward

    def paid(self: RewardRuntime, section: Reward) -> Any:
        found = resolve(self, section)
        return replace(found, concurrency=64, keeps_time=True, paid="judge") if section.name == "judge" else found

    def die(state: State) -> bool:
        if os.environ["RANK"] == "1" and state.step + 1 == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return next_phase(state)

    RewardRuntime._resolve = paid  # type: ignore[method-assign]
    trainer.train.kl_in_reward = die
    return main(arguments)


if __name__ == "__main__":
    leave(run(int(sys.argv[1]), sys.argv[2:]))
