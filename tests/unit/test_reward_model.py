"""kind = "model": a sequence-classification model's score, by its own tokenizer, template and padding."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2Config, GPT2ForSequenceClassification

from tests.tiny import tiny_tokenizer
from tests.tiny_rewards import answered, louder, write_decoder_judge, write_encoder_judge, write_json
from tests.tiny_run import run_config, write_run
from trainer.batch import Prompt
from trainer.config.grpo import Reward
from trainer.errors import Refused
from trainer.models.streaming import Placement
from trainer.preflight.survey import survey
from trainer.rewards.arguments import Signature, arguments
from trainer.rewards.calls import Failed
from trainer.rewards.frozen import FrozenNetwork
from trainer.rewards.reward_model import RewardModel
from trainer.rewards.runtime import RewardRuntime

CPU = torch.device("cpu")
QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]
ANSWERS = ["5", "the answer is 42", "Think", "a b c d"]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder_judge(tmp_path_factory.mktemp("decoder") / "judge")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder_judge(tmp_path_factory.mktemp("encoder") / "judge")


def made(folder: Path) -> RewardModel:
    reward = RewardModel(Reward(name="judge", kind="model", path=str(folder)))
    reward.load(CPU)
    return reward


def scores_alone(folder: Path, answers: list[str]) -> list[float]:
    """By plain transformers, one conversation at a time, nothing padded."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    found = []
    for answer in answers:
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template([*QUESTION, {"role": "assistant", "content": answer}], tokenize=False)
            tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        else:
            tokens = tokenizer(QUESTION[0]["content"], answer, return_tensors="pt")
        with torch.no_grad():
            found.append(float(model(**tokens).logits[0, 0]))
    return found


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_the_score_is_that_of_the_conversation_alone(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    reward, expected = made(folder), scores_alone(folder, ANSWERS)
    assert len({round(score, 3) for score in expected}) == len(ANSWERS)
    assert reward(ANSWERS, asked=[QUESTION] * 4) == pytest.approx(expected, abs=1e-5)
    assert [reward([one], asked=[QUESTION])[0] for one in ANSWERS] == pytest.approx(expected, abs=1e-5)


def pad_on(folder: Path, side: str) -> None:
    content = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", content | {"padding_side": side})


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_b49_the_score_does_not_depend_on_batch_or_padding(
    kind: str, side: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = shutil.copytree(request.getfixturevalue(kind), tmp_path / "judge")
    pad_on(folder, side)
    reward = made(folder)
    # An encoder's head reads the first token, which must not be a pad.
    assert reward.network is not None and reward.network.side == (side if kind == "decoder" else "right")
    assert reward(ANSWERS, asked=[QUESTION] * 4) == pytest.approx(scores_alone(folder, ANSWERS), abs=1e-5)


def test_b49_text_is_encoded_anew_by_the_models_own_tokenizer_and_template(encoder: Path, tmp_path: Path) -> None:
    """Prompt and completion hold ids of a policy's vocabulary, which say nothing here."""
    rewards = RewardRuntime([Reward(name="judge", kind="model", path=str(encoder))], tmp_path)
    rewards.load(CPU)
    rendered = Prompt(
        index=0,
        text="<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n",
        ids=(298, 299),
        messages=None,
        columns={},
        asked=tuple(QUESTION),
    )
    rows = [answered(text, question=QUESTION[0]["content"]) for text in ANSWERS]
    for row in rows[1:]:
        row.prompt = rendered
    rewards.score(rows, 0)
    assert [row.reward for row in rows] == pytest.approx(scores_alone(encoder, ANSWERS), abs=1e-5)


def test_only_who_asks_by_name_is_told_what_was_asked() -> None:
    rows = [answered("7", asked="a column of the data")]
    anything = Signature.of(lambda completions, **columns: None)
    assert arguments(anything, rows)["asked"] == ["a column of the data"]
    judge = Signature.of(lambda completions, asked: None)
    assert arguments(judge, rows)["asked"] == [[{"role": "user", "content": "what is noodles"}]]


def test_a_pad_that_is_also_the_end_does_not_move_the_score(tmp_path: Path) -> None:
    folder = write_decoder_judge(tmp_path / "judge", pad_token_id=299)
    reward = made(folder)
    assert reward.pad_id == 299
    assert reward(ANSWERS, asked=[QUESTION] * 4) == pytest.approx(scores_alone(folder, ANSWERS), abs=1e-5)


def test_a_pad_that_config_lacks_is_the_tokenizers_or_refused(tmp_path: Path) -> None:
    folder = write_decoder_judge(tmp_path / "judge", pad_token_id=None)
    assert json.loads((folder / "config.json").read_text()).get("pad_token_id") is None
    reward = made(folder)
    assert reward.pad_id == 297  # <|endoftext|>
    assert reward(ANSWERS, asked=[QUESTION] * 4) == pytest.approx(scores_alone(folder, ANSWERS), abs=1e-5)
    template = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template, tokenizer.pad_token = template, "<|im_end|>"
    tokenizer.save_pretrained(folder)
    with pytest.raises(Refused, match=r"no pad_token_id, and its tokenizer pads with what ends a text"):
        made(folder)


def test_positions_that_count_pads_are_padded_on_the_other_side(tmp_path: Path) -> None:
    """GPT-2's own tokenizer class asks for the left in many reward models, where its positions are then wrong."""
    sizes = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(GPT2Config(**sizes, num_labels=1, pad_token_id=297)).eval()
    with torch.no_grad():
        model.transformer.wpe.weight *= 20
    louder(model)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    pad_on(tmp_path, "left")
    reward = made(tmp_path)
    assert reward.tokenizer.padding_side == "left" and reward.network is not None and reward.network.side == "right"
    assert reward(ANSWERS, asked=[QUESTION] * 4) == pytest.approx(scores_alone(tmp_path, ANSWERS), abs=1e-5)


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_a_long_question_loses_its_beginning_and_the_answer_nothing(kind: str, request: pytest.FixtureRequest) -> None:
    reward = made(request.getfixturevalue(kind))
    seen: list[list[int]] = []
    call = reward.scored
    reward.scored = lambda rows, **how: seen.extend(row["input_ids"] for row in rows) or call(rows, **how)  # type: ignore[method-assign]
    long = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "7 面 " * 60 + "physics?"}]
    logged: dict[str, float] = {}
    answer = "the answer is 42"
    scores = reward([answer, answer], asked=[long, QUESTION], log_metric=logged.__setitem__)
    assert all(isinstance(score, float) for score in scores) and logged == {"rewards/judge/cut": 0.5}
    text = reward.tokenizer.decode(seen[0])
    assert len(seen[0]) <= reward.window and len(seen[0]) > reward.window - 8
    assert "physics?" in text and answer in text and "Be short." in text and "\ufffd" not in text
    too_long = reward(["42 " * 200], asked=[QUESTION], log_metric=logged.__setitem__)
    assert isinstance(too_long[0], Failed) and "does not fit" in too_long[0].why


def test_a_template_that_refuses_costs_its_row_alone(tmp_path: Path, decoder: Path) -> None:
    folder = shutil.copytree(decoder, tmp_path / "judge")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + str(tokenizer.chat_template)
    )
    tokenizer.save_pretrained(folder)
    system = [{"role": "system", "content": "Be short."}, *QUESTION]
    failed, scored = made(folder)(["5", "5"], asked=[system, QUESTION])
    assert isinstance(failed, Failed) and "no system" in failed.why
    assert scored == pytest.approx(scores_alone(decoder, ["5"])[0], abs=1e-5)


def test_a_new_head_is_refused_by_name(tmp_path: Path, decoder: Path, encoder: Path) -> None:
    for folder, head in [(decoder, "score.weight"), (encoder, "classifier.out_proj.weight")]:
        here = shutil.copytree(folder, tmp_path / head)
        weights = load_file(here / "model.safetensors")
        del weights[head]
        save_file(weights, here / "model.safetensors", {"format": "pt"})
        with pytest.raises(Refused, match=rf"the files lack 1 weights of .*{head}.*start at random"):
            made(here)


def test_a_policy_is_no_reward_model(tmp_path: Path) -> None:
    model = write_run(tmp_path) / "model"
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    write_json(model / "config.json", json.loads((model / "config.json").read_text()) | labels)
    with pytest.raises(Refused, match=r"the files lack 1 weights of Qwen2ForSequenceClassification .*score\.weight"):
        made(model)


def test_several_outputs_and_no_template_are_refused(tmp_path: Path) -> None:
    labels = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}, "num_labels": 2}
    with pytest.raises(Refused, match=r"2 outputs \(bad, good\)"):
        made(write_decoder_judge(tmp_path / "two", **labels))
    bare = write_decoder_judge(tmp_path / "bare")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(Refused, match="neither a chat template nor a separator"):
        made(bare)


def test_own_code_is_not_run(tmp_path: Path) -> None:
    folder = write_decoder_judge(tmp_path / "judge")
    config = json.loads((folder / "config.json").read_text())
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Judge: pass\n")
    write_json(folder / "config.json", config | {"model_type": "own", "auto_map": {"AutoConfig": "code.Judge"}})
    with pytest.raises(Refused, match=r"reward\.judge\.path = .*transformers cannot load it"):
        made(folder)
    assert not (tmp_path / "ran").exists()


def test_bf16_stays_and_fp16_becomes_fp32(tmp_path: Path) -> None:
    for dtype, used in [("bfloat16", torch.bfloat16), ("float16", torch.float32)]:
        folder = write_decoder_judge(tmp_path / dtype)
        write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | {"dtype": dtype})
        reward = made(folder)
        assert reward.network is not None and next(reward.network.network.parameters()).dtype == used
        assert reward(ANSWERS, asked=[QUESTION] * 4) == pytest.approx(scores_alone(folder, ANSWERS), abs=0.1)


def test_nothing_stays_on_the_device(decoder: Path) -> None:
    reward, placement = made(decoder), Placement(CPU)
    expected = reward(ANSWERS, asked=[QUESTION] * 4)
    network = reward.build()
    size = sum(one.nbytes for one in (*network.parameters(), *network.buffers()))
    reward.network = FrozenNetwork(network, reward.pad_id, "right", placement, "judge")
    assert reward(ANSWERS, asked=[QUESTION] * 4) == expected
    assert placement.peak["judge", "device"] == size == placement.held["judge", "host"]
    assert placement.held["judge", "device"] == 0


def test_preflight_shows_what_it_says_of_one_row(tmp_path: Path, decoder: Path) -> None:
    folder = write_run(tmp_path)
    rows = [{"prompt": f"{n} + 3?", "answer": str(n + 3)} for n in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = run_config(folder, {"reward": [{"name": "judge", "kind": "model", "path": str(decoder)}]})
    found = survey(config, folder, CPU, ranks=1, begins=False)
    assert found.errors == [] and found.probes is not None
    scores = found.probes.scores["judge"]
    assert set(scores) == {"reference", "shuffled", "empty"} and None not in scores.values()
    (told,) = [note for note in found.notes if note.startswith("reward 'judge'")]
    assert (
        "score of a Qwen2ForSequenceClassification, question and answer by its chat template, up to 64 tokens" in told
    )
