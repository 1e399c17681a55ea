"""kind = "embedding": the cosine of a sentence encoder, read as its folder says."""

import json
import pickle
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

from tests.tiny_rewards import answered, write_encoder, write_json
from tests.tiny_run import PROMPTS, run_config, start, step, write_run
from trainer.config.grpo import Reward
from trainer.errors import Refused
from trainer.models.streaming import Placement
from trainer.preflight.survey import survey
from trainer.rewards import embedding, frozen
from trainer.rewards.embedding import EmbeddingReward
from trainer.rewards.frozen import FrozenNetwork
from trainer.rewards.runtime import RewardRuntime
from trainer.world import World

CPU = torch.device("cpu")
TEXTS = ["noodles", "the answer is noodles", "physics " * 9, "7", "what is physics? 面条"]
REFERENCES = ["the noodles", "physics", "noodles", "8", "noodles"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / "bge-m3")


def made(folder: Path, **keys: Any) -> EmbeddingReward:
    reward = EmbeddingReward(Reward(name="similarity", kind="embedding", path=str(folder), **keys))
    reward.load(CPU)
    return reward


def vectors(folder: Path, texts: list[str]) -> np.ndarray:
    """By plain transformers, one text at a time: pooling and projection as the folder's files say, length 1."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    is_cls = json.loads((folder / "1_Pooling/config.json").read_text())["pooling_mode_cls_token"]
    found = []
    for text in texts:
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].double().numpy()
        vector = states[0] if is_cls else states.mean(axis=0)
        if (folder / "2_Dense").is_dir():
            weights = {
                name: one.double().numpy() for name, one in load_file(folder / "2_Dense/model.safetensors").items()
            }
            vector = np.tanh(weights["linear.weight"] @ vector + weights["linear.bias"])
        found.append(vector / np.linalg.norm(vector))
    return np.stack(found)


@pytest.mark.parametrize("shape", [{"pooling": "cls"}, {"pooling": "mean"}, {"pooling": "mean", "dense": 6}], ids=str)
def test_the_score_is_the_cosine_of_what_plain_transformers_gives(tmp_path: Path, shape: dict[str, Any]) -> None:
    folder = write_encoder(tmp_path / "encoder", **shape)
    expected = (vectors(folder, TEXTS) * vectors(folder, REFERENCES)).sum(axis=1)
    assert made(folder)(TEXTS, answer=REFERENCES) == pytest.approx(expected.tolist(), abs=1e-6)
    assert np.ptp(expected) > 0.1
    alone = [made(folder)([text], answer=[answer])[0] for text, answer in zip(TEXTS[:2], REFERENCES[:2], strict=True)]
    assert alone == pytest.approx(expected[:2].tolist(), abs=1e-6)


def test_bge_m3_reads_8192_tokens_and_has_1024_numbers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 16}
    folder = write_encoder(tmp_path / "bge-m3", window=8192, **sizes)
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 8194
    reward = EmbeddingReward(Reward(name="similarity", kind="embedding", path=str(folder)))
    told = reward.load(CPU)
    assert "1024 numbers (cls), of texts up to 8192 tokens" in told and "XLMRobertaModel" in told
    assert reward.dimensions == 1024 and reward.window == 8192


def test_a_long_text_keeps_its_beginning_and_is_counted(encoder: Path) -> None:
    reward = made(encoder)
    beginning = "physics " * 126  # and the two special tokens
    logged: dict[str, float] = {}
    scores = reward([beginning, beginning + "noodles " * 50, "noodles"], ["noodles"] * 3, logged.__setitem__)
    assert scores[0] == scores[1] != scores[2]
    assert logged == {
        "rewards/similarity/cut": pytest.approx(1 / 3),
        "rewards/similarity/empty": 0.0,
    }
    long_answer = reward(["7", "7"], ["noodles", "noodles " * 400], logged.__setitem__)
    assert len(long_answer) == 2 and logged["rewards/similarity/cut"] == 0.5


def test_a_stated_length_beyond_the_positions_is_not_believed(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "encoder", window=32)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 512})
    assert made(folder).window == 32
    assert len(made(folder)(["noodles " * 400], answer=["physics"])) == 1


def test_nothing_said_is_worth_0_and_an_empty_answer_is_no_number(encoder: Path) -> None:
    reward = made(encoder)
    empty, blank, wrong, unanswered = reward(["", " \n", "physics", "physics"], ["noodles", "noodles", "noodles", " "])
    assert (empty, blank) == (0.0, 0.0) and wrong != 0.0
    assert unanswered == embedding.Failed("its reference answer is empty")


def test_messages_hold_their_text(encoder: Path) -> None:
    reward = made(encoder)
    chat = [[{"role": "assistant", "content": "noodles"}]]
    assert reward(chat, answer=chat) == reward(["noodles"], answer=["noodles"]) == [pytest.approx(1.0)]


def test_a_text_is_encoded_once_a_step_and_an_answer_once_for_all(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = made(encoder)
    asked: list[tuple[int, bool]] = []
    call = FrozenNetwork.__call__

    def counted(self: FrozenNetwork, rows: Any, *, alone: bool = False) -> torch.Tensor:
        asked.append((len(rows), alone))
        return call(self, rows, alone=alone)

    monkeypatch.setattr(FrozenNetwork, "__call__", counted)
    first = reward(["noodles", "noodles", "physics"], ["7", "7", "7"])
    assert asked == [(2, False), (1, True)]
    assert reward(["noodles", "noodles", "physics"], ["7", "7", "7"]) == first and asked[2:] == [(2, False)]
    monkeypatch.setattr(embedding, "KEPT_REFERENCES", 2)
    reward(["noodles"] * 3, ["1", "2", "3"])
    assert list(reward.references) == ["1", "2", "3"]  # those of the call itself
    reward(["noodles"], ["2"])
    assert list(reward.references) == ["3", "2"]


def test_a_kept_answer_has_the_bits_of_a_new_one(encoder: Path) -> None:
    """A resumed run has none kept."""
    texts = ["noodles", "physics " * 20]
    went_on = made(encoder)
    went_on(["7"] * 3, ["what is physics", "noodles", "the answer is 7"])
    assert went_on(texts, ["noodles"] * 2) == made(encoder)(texts, ["noodles"] * 2)


def test_batches_are_of_like_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "BATCH_TOKENS", 12)
    rows = [{"input_ids": [5] * length} for length in (1, 6, 2, 13, 5, 1)]
    assert list(frozen.batches(rows)) == [[3], [1, 4], [2, 0, 5]]


def change(folder: Path, file: str, **keys: Any) -> None:
    content = json.loads((folder / file).read_text())
    write_json(folder / file, content | keys)


def no_pooling(folder: Path) -> None:
    (folder / "modules.json").unlink()


def own_code(folder: Path) -> None:
    listed = json.loads((folder / "modules.json").read_text())
    write_json(folder / "modules.json", [listed[0], listed[1] | {"type": "custom.Pooling"}])


def other_pooling(folder: Path) -> None:
    change(folder, "1_Pooling/config.json", pooling_mode_cls_token=False, pooling_mode_max_tokens=True)


def other_stage(folder: Path) -> None:
    listed = json.loads((folder / "modules.json").read_text())
    write_json(folder / "modules.json", [*listed, listed[1] | {"idx": 9, "type": "sentence_transformers.models.LSTM"}])


def untrained_head(folder: Path) -> None:
    (folder / "2_Dense/model.safetensors").unlink()


def other_activation(folder: Path) -> None:
    change(folder, "2_Dense/config.json", activation_function="custom.Activation")


def missing_weights(folder: Path) -> None:
    from safetensors.torch import save_file

    weights = load_file(folder / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def other_shapes(folder: Path) -> None:
    change(folder, "config.json", intermediate_size=64)


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_modules(folder: Path) -> None:
    (folder / "modules.json").write_text("[{]")


def no_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (no_pooling, ["no modules.json there", "CLS or mean"]),
        (own_code, ["custom.Pooling", "code of its own is never run"]),
        (other_pooling, ["pooling max", "pip install 'zero-grpo[embed]'"]),
        (other_stage, ["names LSTM", "pip install 'zero-grpo[embed]'"]),
        (untrained_head, ["2_Dense has no weights", "never trained makes random rewards"]),
        (other_activation, ["custom.Activation", "2_Dense/config.json"]),
        (missing_weights, ["the files lack 1 weights of XLMRobertaModel", "encoder.layer.1.output.dense.weight"]),
        (other_shapes, ["do not have the shape of config.json"]),
        (no_config, ["no config.json there"]),
        (broken_modules, ["transformers cannot load it: Expecting"]),
        (no_tokenizer, ["there is no tokenizer"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_folder_that_is_no_whole_encoder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Any, said: list[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", without("sentence_transformers"))
    folder = write_encoder(tmp_path / "encoder", dense=6)
    broken(folder)
    with pytest.raises(Refused) as refused:
        RewardRuntime([Reward(name="close", kind="embedding", path=str(folder))], tmp_path).load(CPU)
    assert [part for part in said if part not in str(refused.value)] == []
    assert str(folder) in str(refused.value) and "model.name_or_path" not in str(refused.value)


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ({"type": "sentence_transformers.models.Router"}, "Router, none of the modules"),
        ({"type": "sentence_transformers.base.modules.router.Router"}, "Router, none of the modules"),
        ({"type": "sentence_transformers.models.WordEmbeddings"}, "WordEmbeddings, none of the modules"),
        ({"type": "sentence_transformers.util.import_from_string"}, "none of the modules"),
        ({"type": "sentence_transformers.models.Transformer"}, "one Transformer, the first"),
        ({"path": "../payload"}, "names ../payload, outside of its folder"),
        ({"settings": "code.Activation"}, "names code.Activation, code that is never run"),
        ({"settings": "torch.hub.load"}, "names torch.hub.load, code that is never run"),
    ],
    ids=str,
)
def test_s3_a_sentence_encoder_imports_nothing_that_its_files_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: dict[str, str], said: str
) -> None:
    """Where sentence-transformers is installed: a stand-in for it loads whatever it is given."""

    class Loads:
        @staticmethod
        def load(folder: str) -> torch.nn.Module:
            (tmp_path / "canary").mkdir()
            return torch.nn.Identity()

    package, util = ModuleType("sentence_transformers"), ModuleType("sentence_transformers.util")
    package.__spec__ = ModuleSpec("sentence_transformers", None)
    monkeypatch.setattr(util, "import_from_string", lambda name: Loads, raising=False)
    monkeypatch.setitem(sys.modules, "sentence_transformers", package)
    monkeypatch.setitem(sys.modules, "sentence_transformers.util", util)
    folder = write_encoder(tmp_path / "encoder", dense=6)
    shutil.copytree(folder / "2_Dense", tmp_path / "payload")
    listed = json.loads((folder / "modules.json").read_text())
    if "settings" in stage:
        change(folder, "2_Dense/config.json", activation_function=stage["settings"])
    else:
        write_json(folder / "modules.json", [*listed[:2], listed[2] | stage])
    with pytest.raises(Refused, match=said):
        RewardRuntime([Reward(name="close", kind="embedding", path=str(folder))], tmp_path).load(CPU)
    assert not (tmp_path / "canary").exists()


def without(missing: str) -> Any:
    import importlib.util

    find = importlib.util.find_spec
    return lambda name, package=None: None if name == missing else find(name, package)


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    folder = write_encoder(tmp_path / "encoder")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert made(folder)(["noodles"], answer=["noodles"]) == [pytest.approx(1.0)]  # as bge-m3 is on the hub
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(Refused, match="transformers cannot load it"):
        made(folder)
    assert not (tmp_path / "ran").exists()


def test_a_hub_name_is_read_from_the_cache(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, root = "5617a9f61b028005a4858fdac845db406aefb181", tmp_path / "hub/models--BAAI--bge-m3"
    (root / "refs").mkdir(parents=True)
    (root / "refs/main").write_text(commit)
    (root / "snapshots").mkdir()
    (root / "snapshots" / commit).symlink_to(encoder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for place in ("huggingface_hub.constants.HF_HUB_CACHE", "transformers.utils.hub.constants.HF_HUB_CACHE"):
        monkeypatch.setattr(place, str(tmp_path / "hub"))
    reward = EmbeddingReward(Reward(name="similarity", kind="embedding", path="BAAI/bge-m3"))
    assert "BAAI/bge-m3" in reward.load(CPU)
    assert reward(["noodles"], answer=["physics"]) == made(encoder)(["noodles"], answer=["physics"])


def test_scores_are_the_same_through_the_device_and_nothing_stays_there(encoder: Path) -> None:
    reward, placement = made(encoder), Placement(CPU)
    expected = reward(TEXTS, answer=REFERENCES)
    network = reward.build()
    size = sum(one.nbytes for one in (*network.parameters(), *network.buffers()))
    role = "reward similarity"
    reward.network = FrozenNetwork(network, reward.pad_id, "right", placement, role)
    reward.references.clear()
    assert reward(TEXTS, answer=REFERENCES) == expected
    assert placement.peak[role, "device"] == size and placement.held[role, "host"] == size
    assert placement.held[role, "device"] == 0


def test_other_weights_and_another_pooling_have_another_hash(tmp_path: Path, encoder: Path) -> None:
    signed = {made(encoder).sha256, made(write_encoder(tmp_path / "same")).sha256}
    assert len(signed) == 1
    signed.add(made(write_encoder(tmp_path / "weights", seed=1)).sha256)
    signed.add(made(write_encoder(tmp_path / "pooling", pooling="mean")).sha256)
    assert len(signed) == 3


SEEDS_ROWS = [
    {"id": n, "query": f"{prompt} of noodles", "chosen": f"the answer is {n}", "rejected": "physics"}
    for n, prompt in enumerate(PROMPTS)
]


@pytest.fixture
def seeds_run(tmp_path: Path) -> Path:
    """The document's rows, a tiny policy, and an encoder of bge-m3's layout."""
    folder = write_run(tmp_path)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SEEDS_ROWS))
    write_encoder(folder / "bge-m3")
    return folder


def encoder_config(folder: Path) -> dict[str, Any]:
    return {"reward": [{"name": "similarity", "kind": "embedding", "path": str(folder / "bge-m3")}]}


def test_the_documents_rows_train_by_their_cosine(seeds_run: Path, world: World) -> None:
    state = start(seeds_run, world, encoder_config(seeds_run))
    assert any("reward 'similarity': cosine of XLMRobertaModel's" in note for note in state.notes)
    assert "reward.similarity.path" in state.facts.sources
    before = [one.detach().clone() for one in state.policy.causal.parameters() if one.requires_grad]
    for _ in range(2):
        metrics, completions = step(state)
        said = [completion for completion in completions if completion.text.strip()]
        ours = vectors(seeds_run / "bge-m3", [completion.text.strip() for completion in said])
        theirs = vectors(seeds_run / "bge-m3", [SEEDS_ROWS[one.prompt.index]["chosen"] for one in said])
        rewards = [completion.reward for completion in said]
        assert rewards == pytest.approx((ours * theirs).sum(axis=1).tolist(), abs=1e-5) and len(set(rewards)) > 4
        assert all(completion.reward == 0.0 for completion in completions if not completion.text.strip())
        assert metrics["rewards/similarity/cut"] == 0.0
    after = [one for one in state.policy.causal.parameters() if one.requires_grad]
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    state.engine.close()


def test_preflight_tries_the_encoder_and_says_what_it_read(seeds_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    build = EmbeddingReward.build
    monkeypatch.setattr(EmbeddingReward, "build", lambda self: built.append(self.path) or build(self))
    config = run_config(seeds_run, encoder_config(seeds_run))
    found = survey(config, seeds_run, CPU, ranks=1, begins=False)
    assert found.errors == [] and found.probes is not None and found.rewards is not None
    scores = found.probes.scores["similarity"]
    assert scores["reference"] == pytest.approx(1.0) and scores["empty"] == 0.0 and scores["shuffled"] < 1.0
    assert any("vectors of 32 numbers (cls)" in note and "bge-m3" in note for note in found.notes)
    assert found.rewards.load(CPU) == [] and len(built) == 1


def test_rows_without_an_answer_are_refused_with_the_columns_there_are(seeds_run: Path) -> None:
    rows = [{"query": row["query"], "topic": "food"} for row in SEEDS_ROWS]
    (seeds_run / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = survey(run_config(seeds_run, encoder_config(seeds_run)), seeds_run, CPU, ranks=1, begins=False)
    (said,) = found.errors
    assert "needs the column 'answer', which the data lack (columns present: topic)" in said and "bge-m3" in said


def test_answers_that_are_missing_are_named_by_row(encoder: Path, tmp_path: Path) -> None:
    rewards = RewardRuntime([Reward(name="similarity", kind="embedding", path=str(encoder))], tmp_path)
    prompts = [answered("7", index=n, answer=answer).prompt for n, answer in enumerate(["noodles", "", None])]
    (said,) = rewards.check(prompts)
    assert "reads 'answer', which is missing or empty in 2 rows: 2, 3" in said
