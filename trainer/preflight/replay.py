"""Checks of ``rollout.replay``: recorded steps are there, whole, and in the policy's own vocabulary."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from trainer.batch import Prompt
from trainer.collect import recorded_prompt
from trainer.config import RunConfig
from trainer.data.prompts import PromptSets
from trainer.errors import Refused
from trainer.models.vocabulary import Vocabulary, check_same, vocabulary_of
from trainer.record.rollout_rows import read_rollouts


def check_replay(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[PromptSets, int]:
    """Reads every step that the run will replay. Returns the recorded prompts and the number of steps."""
    folder = Path(config.rollout.replay)
    recorded = sorted(folder.glob("step-*.jsonl")) or sorted((folder / "rollouts").glob("step-*.jsonl"))
    if not recorded:
        raise Refused(
            f"rollout.replay = {folder}: no step-000001.jsonl there. Fix: give a run directory, or its rollouts/ "
            "folder."
        )
    steps = config.run.steps or len(recorded)
    if steps > len(recorded):
        raise Refused(
            f"run.steps = {steps}, but rollout.replay = {folder} holds {len(recorded)} steps. Fix: run.steps = "
            f"{len(recorded)}."
        )
    vocabulary = recorded[0].parent / "vocabulary.json"
    if vocabulary.is_file():
        check_same(vocabulary_of(tokenizer), Vocabulary.load(vocabulary), f"rollout.replay = {folder}")
    names = {reward.name for reward in config.reward}
    prompts: dict[int, Prompt] = {}
    for step in range(1, steps + 1):
        rows = read_rollouts(folder, step)
        for number, row in enumerate(rows, 1):
            _check_ids(folder, step, number, row["prompt_ids"] + row["completion_ids"], len(tokenizer))
            _check_rewards(folder, step, number, row["rewards"], names)
            prompts[row["row"]] = recorded_prompt(row)
        if len(rows) < config.completions_per_step:
            raise Refused(
                f"rollout.replay = {folder}: step {step} holds {len(rows)} completions, a step of the run file "
                f"{config.completions_per_step}. Fix: rollout.prompts_per_step and rollout.num_generations as recorded."
            )
    return PromptSets(
        train=list(prompts.values()), eval=[], notes=[f"replaying {steps} recorded steps of {folder}"]
    ), steps


def _check_ids(folder: Path, step: int, number: int, ids: list[int], size: int) -> None:
    beyond = [token for token in ids if not 0 <= token < size]
    if beyond:
        raise Refused(
            f"rollout.replay = {folder}: step {step}, row {number} holds token {beyond[0]}, beyond this tokenizer's "
            f"{size}. "
            "Fix: replay with the model that recorded it."
        )


def _check_rewards(folder: Path, step: int, number: int, recorded: dict[str, float | None], names: set[str]) -> None:
    if names and names != set(recorded):
        raise Refused(
            f"rollout.replay = {folder}: step {step}, row {number} has the rewards "
            f"{', '.join(sorted(recorded)) or 'none'}, "
            f"the run file {', '.join(sorted(names))}. Fix: name the same ones, or leave [[reward]] out."
        )
