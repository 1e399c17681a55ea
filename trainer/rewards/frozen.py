"""What encoders and reward models share: a frozen network, read once, kept on the CPU, on a card as it scores."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trainer import heartbeat
from trainer.config.grpo import Reward
from trainer.config.sections import Model
from trainer.errors import Refused
from trainer.models.fingerprint import fingerprint
from trainer.models.source import loaded, refuse_missing, refuse_shapes
from trainer.models.streaming import Placement

T = TypeVar("T")
Row = Mapping[str, list[int]]
"""One text as the tokenizer gives it: input_ids, attention_mask, and token_type_ids where the model reads them."""
Side = Literal["left", "right"]

BATCH_TOKENS = 16_384
"""Of one pass, padding included: what a card needs to be busy, and 0.3 GB of states for 1024 dimensions."""
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "[0-9]*_*/*")
"""What is read of a hub name before its weights are: settings, tokenizer, and a sentence encoder's own heads."""

UNLIMITED = 10**9
SIGNED_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*/config.json")


class FrozenNetwork:
    """Scores rows of tokens in batches of like length. ``placement`` None: it scores where it lies, on the CPU."""

    def __init__(self, network: nn.Module, pad_id: int, side: Side, placement: Placement | None, role: str) -> None:
        self.pad_id, self.side, self.placement, self.role = pad_id, side, placement, role
        self.network = network.requires_grad_(False).eval()
        if placement is not None:
            self.network = placement.frozen(self.network, role, "host")

    @torch.no_grad()
    def __call__(self, rows: Sequence[Row], *, alone: bool = False) -> Tensor:
        """(n, D) fp32 on the CPU, in the order of the rows. ``alone``: a pass for each, so that no last bit of it
        depends on the others."""
        device = torch.device("cpu") if self.placement is None else self.placement.device
        found: dict[int, Tensor] = {}
        for run in self._passes():
            for places in [[place] for place in range(len(rows))] if alone else batches(rows):
                heartbeat.beat()
                inputs = padded([rows[place] for place in places], self.pad_id, self.side)
                scored = run(**{name: ids.to(device) for name, ids in inputs.items()})
                found |= zip(places, scored.float().cpu(), strict=True)
        return torch.stack([found[place] for place in range(len(rows))])

    def _passes(self) -> Iterator[Callable[..., Any]]:
        if self.placement is None:
            return iter((self.network,))
        return self.placement.through([self.network], self.role)


def batches(rows: Sequence[Row]) -> Iterator[list[int]]:
    """Places of the rows, longest first, so that little is padding and the first batch is the largest."""
    order = sorted(range(len(rows)), key=lambda place: -len(rows[place]["input_ids"]))
    while order:
        count = max(1, BATCH_TOKENS // max(1, len(rows[order[0]]["input_ids"])))
        yield order[:count]
        order = order[count:]


def padded(rows: Sequence[Row], pad_id: int, side: Side) -> dict[str, Tensor]:
    """(B, L) int64 each; pads have ``pad_id`` and an attention mask of 0."""
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(ids: list[int], fill: int) -> list[int]:
        pads = [fill] * (longest - len(ids))
        return ids + pads if side == "right" else pads + ids

    return {
        name: torch.tensor([filled(row[name], pad_id if name == "input_ids" else 0) for row in rows])
        for name in rows[0]
    }


class ModelReward(ABC):
    """A reward that a frozen network gives. Made, it has looked at the folder; ``load`` reads the weights, once."""

    kind: str
    """What messages call the model that is wanted."""

    def __init__(self, section: Reward) -> None:
        self.name, self.path, self.key = section.name, section.path, f"reward.{section.name}.path"
        self.model = Model(name_or_path=section.path)
        self.folder = self.read(lambda: _folder(section.path))
        self.config = self.read(lambda: AutoConfig.from_pretrained(section.path, trust_remote_code=False))
        self.tokenizer: PreTrainedTokenizerBase = self.read(
            lambda: AutoTokenizer.from_pretrained(section.path, trust_remote_code=False)
        )
        files = self.tokenizer.vocab_files_names.values()
        if not any((self.folder / name).is_file() for name in files):  # transformers makes an empty one without them
            raise Refused(
                f"{self.key} = {section.path}: there is no tokenizer ({' or '.join(files)}). Fix: copy all of it."
            )
        # fp16 would overflow in some of these models, and a CPU gains nothing by it.
        self.dtype = torch.bfloat16 if str(self.config.dtype).endswith("bfloat16") else torch.float32
        self.network: FrozenNetwork | None = None
        self.sha256 = ""

    @property
    def stated_pad_id(self) -> int | None:
        """Of config.json."""
        stated = self.config.get_text_config().to_dict().get("pad_token_id")
        return stated if stated is not None and stated >= 0 else None

    def read(self, load: Callable[[], T]) -> T:
        return loaded(self.model, load, self.key, self.kind)

    def load(self, device: torch.device) -> str:
        """Reads the weights; what they are, in words. Refused where any is missing, or of another shape."""
        network = self.build()
        placement = Placement(device) if device.type == "cuda" else None
        self.network = FrozenNetwork(network, self.pad_id, self.side(network), placement, f"reward {self.name}")
        self.sha256 = self._signed(network)
        count = sum(weight.numel() for weight in network.parameters())
        size = f"{count / 1e6:,.0f}M" if count >= 1e7 else f"{count:,}"
        where = "on the CPU" if placement is None else "kept on the CPU, on the card while it scores"
        dtype = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        return f"reward {self.name!r}: {self.described()}; {size} weights of {self.path} in {dtype}, {where}"

    @abstractmethod
    def build(self) -> nn.Module:
        """The network with its weights: tokens in, (B, D) out."""

    @property
    @abstractmethod
    def pad_id(self) -> int: ...

    @abstractmethod
    def side(self, network: nn.Module) -> Side:
        """Where rows are padded."""

    @abstractmethod
    def described(self) -> str: ...

    def scored(self, rows: Sequence[Row], *, alone: bool = False) -> Tensor:
        assert self.network is not None, "load() comes first"
        return self.network(rows, alone=alone)

    def pretrained(self, auto: Any) -> Any:
        """The model by an Auto class, weights that the files lack being refused. Pickles (.bin) are read by torch's
        weights-only reader, which runs no code of theirs."""
        arguments = {"trust_remote_code": False, "output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = self.read(lambda: auto.from_pretrained(self.path, dtype=self.dtype, **arguments))
        if misfits := sorted(info["mismatched_keys"]):
            refuse_shapes(self.model, misfits)
        if missing := sorted(name for name in map(str, info["missing_keys"]) if not self.is_unused(name)):
            refuse_missing(self.model, type(model).__name__, missing)
        return model

    def is_unused(self, name: str) -> bool:
        """Whether the reward does without that weight."""
        return False

    def _signed(self, network: nn.Module) -> str:
        """Of the weights, and of the files that say how texts become tokens and states become a score."""
        digest = hashlib.sha256(fingerprint(network).encode())
        for file in sorted(file for pattern in SIGNED_FILES for file in self.folder.glob(pattern)):
            digest.update(file.relative_to(self.folder).as_posix().encode() + file.read_bytes())
        return digest.hexdigest()


def positions(network: nn.Module) -> int:
    """Tokens that a row of a transformers model may have."""
    tables = [part for name, part in network.named_modules() if name.endswith("position_embeddings")]
    if tables and isinstance(tables[0], nn.Embedding):
        pad = tables[0].padding_idx  # whose row, as in XLM-R, comes before the first position's
        return tables[0].num_embeddings - (0 if pad is None else pad + 1)
    assert isinstance(network, PreTrainedModel)
    stated: int = network.config.get_text_config().to_dict().get("max_position_embeddings") or UNLIMITED
    return stated


def _folder(path: str) -> Path:
    return Path(path) if Path(path).is_dir() else Path(snapshot_download(path, allow_patterns=list(SMALL_FILES)))
