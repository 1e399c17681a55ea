"""The names of other trainers get an answer, and every answer names keys that exist."""

import re

import pytest

from trainer.config import load
from trainer.config.fields import dotted_keys, expected, field_at
from trainer.config.names import ABSENT, PEERS, VALUES, answer
from trainer.errors import Refused


@pytest.mark.parametrize(
    ("name", "key"),
    [
        # TRL, with Hugging Face's arguments
        ("beta", "grpo.kl.coef"),
        ("max_completion_length", "rollout.max_new_tokens"),
        ("num_iterations", "grpo.updates_per_rollout"),
        ("epsilon", "grpo.eps_low"),
        ("epsilon_high", "grpo.eps_high"),
        ("delta", "grpo.dual_clip"),
        ("mask_truncated_completions", "grpo.mask_truncated"),
        ("load_in_4bit", "quant.bits"),
        ("per_device_train_batch_size", "engine.micro_batch"),
        ("learning_rate", "optim.lr"),
        ("output_dir", "run.dir"),
        ("max_steps", "run.steps"),
        ("lora_target_modules", "lora.targets"),
        # OpenRLHF
        ("kl_loss_coef", "grpo.kl.coef"),
        ("n_samples_per_prompt", "rollout.num_generations"),
        ("rollout_batch_size", "rollout.prompts_per_step"),
        ("init_kl_coef", "grpo.kl.coef"),
        ("micro_train_batch_size", "engine.micro_batch"),
        ("algo.kl.init_coef", "grpo.kl.coef"),
        ("actor.eps_clip", "grpo.eps_low"),
        # verl
        ("actor_rollout_ref.rollout.n", "rollout.num_generations"),
        ("actor_rollout_ref.actor.optim.lr", "optim.lr"),
        ("actor.optim.lr", "optim.lr"),
        ("actor_rollout_ref.actor.kl_loss_coef", "grpo.kl.coef"),
        ("actor_rollout_ref.model.path", "model.name_or_path"),
        ("algorithm.use_kl_in_reward", "grpo.kl.placement"),
        ("actor_rollout_ref.actor.clip_ratio_c", "grpo.dual_clip"),
        # slime, as flags
        ("kl-loss-type", "grpo.kl.estimator"),
        ("n-samples-per-prompt", "rollout.num_generations"),
        ("rollout-max-response-len", "rollout.max_new_tokens"),
        ("eps-clip-high", "grpo.eps_high"),
        ("num-rollout", "run.steps"),
        ("max-tokens-per-gpu", "engine.token_budget"),
    ],
)
def test_peer_name_is_answered_with_our_key(name, key):
    assert re.match(rf"Use {re.escape(key)}\b", answer(name.split("."))), answer(name.split("."))


def test_every_answer_names_keys_that_exist():
    ours = dotted_keys()
    assert len(PEERS) >= 60
    for peer, text in PEERS.items():
        assert text.split()[0].rstrip(",;") in ours, peer
    for peer, text in (PEERS | ABSENT).items():
        for named in re.findall(
            r"\b(?:rollout|grpo|optim|engine|quant|lora|data|run|eval|log|model|reward)\.\w[\w.]*\w", text
        ):
            assert named in ours, (peer, named)


def test_every_value_that_is_proposed_can_be_written():
    for key, values in VALUES.items():
        field = field_at(key.split("."))
        assert field is not None, key
        for theirs, ours in values.items():
            assert f'"{ours}"' in expected(field.annotation), (key, ours)
            assert f'"{theirs}"' not in expected(field.annotation), (key, theirs)


def test_no_peer_name_hides_a_key_of_ours():
    # A dotted peer name that is also ours would send the user away from a key that exists.
    assert not set(dotted_keys()) & (PEERS.keys() | ABSENT.keys()) - {"model.name_or_path"}


def test_names_without_a_counterpart_say_why():
    assert "engine.micro_batch" in answer(["gradient_accumulation_steps"])
    assert "There is no such key" in answer(["load_in_8bit"])
    assert answer(["qqqqqq"]) == ""


def test_near_misses_stay_in_their_table():
    assert answer(["grpo", "esp_low"]) == "Did you mean grpo.eps_low?"
    assert answer(["eval", "evry"]) == "Did you mean eval.every?"
    assert "run.steps" in answer(["optim", "steps"])


def test_a_foreign_table_is_answered_leaf_by_leaf(tmp_path):
    file = tmp_path / "verl.toml"
    file.write_text("[actor_rollout_ref.rollout]\nn = 8\n[actor_rollout_ref.actor]\nkl_loss_coef = 0.1\n")
    with pytest.raises(Refused) as caught:
        load(str(file))
    message = str(caught.value)
    assert "actor_rollout_ref.rollout.n: Use rollout.num_generations." in message
    assert "actor_rollout_ref.actor.kl_loss_coef: Use grpo.kl.coef." in message
