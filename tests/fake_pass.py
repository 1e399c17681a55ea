"""Forward and backward passes of real shapes on fake tensors, with every storage counted: what trainer/plan predicts.

The engine is a stand-in that holds what ZeRO-2 holds on one rank in bf16: master weights and moments, a bucket from the
first gradient on, an fp32 gradient from the first full bucket on. A weight's own gradient goes as soon as it is there,
but for those larger than the bucket.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers.masking_utils
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from pytest import MonkeyPatch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from tools.bench_inputs import SHAPES
from trainer.batch import Completion, PackedRows, Prompt
from trainer.models import shared_prefix
from trainer.models.packing import pack, pack_groups
from trainer.models.scorer import TokenScorer
from trainer.plan.settings import Settings, Zero
from trainer.plan.shape import shape_of
from trainer.plan.state import NF4
from trainer.record.memory import PeakMemory

CPU = torch.device("cpu")
BUCKET = 50_000_000

CONFIGS: dict[str, dict[str, Any]] = {
    "1.5B": {
        key: value for key, value in SHAPES["qwen2.5-1.5b"].items() if key not in ("model_type", "rope_parameters")
    },
    "7B": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
"""Qwen2.5's."""


@dataclass(frozen=True)
class Cell:
    model: str
    mode: str
    """lora, full or 4bit."""
    prompt: int
    new: int
    generations: int
    shared: bool
    checkpointing: bool
    groups: int = 1
    layers: int = 28
    exact: bool = False

    @property
    def config(self) -> dict[str, Any]:
        return CONFIGS[self.model] | {"num_hidden_layers": self.layers}

    def settings(self) -> Settings:
        shape = shape_of({"model_type": "qwen2"} | self.config)
        assert shape is not None
        return Settings(
            shape=shape,
            rank=0 if self.mode == "full" else 16,
            targets=frozenset() if self.mode == "full" else frozenset(shape.linears),
            bits=4 if self.mode == "4bit" else 0,
            itemsize=2,
            cuda=False,
            ranks=1,
            zero=Zero(2, BUCKET, 10**9, False, False),
            optimizer="adamw",
            reference="adapter" if self.exact else "none",
            exact=self.exact,
            prompt=self.prompt,
            new=self.new,
            generations=self.generations,
            prompts=self.groups,
            shared=self.shared,
            decodes_shared=self.shared,
            micro_batch=0,
            token_budget=10**6,
            checkpointing=self.checkpointing,
        )

    def completions(self) -> list[Completion]:
        found = []
        for group in range(self.groups):
            prompt = Prompt(group, "", tuple(range(self.prompt)), None, {})
            ids = tuple(range(self.new))
            found += [Completion(group, i, prompt, ids, (0.0,) * len(ids), "stop", "") for i in range(self.generations)]
        return found


class _Dequantised(torch.autograd.Function):
    """As bitsandbytes' 4-bit product: the weight is written out in the forward pass and again in the backward pass, and
    neither it nor the input is kept."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.shape = shape
        return inputs @ inputs.new_empty(shape).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gradient @ gradient.new_empty(ctx.shape), None, None


class FourBit(nn.Module):
    """In place of a Linear4bit, whose kernels have no fake implementation."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.shape = (linear.out_features, linear.in_features)
        self.bias = linear.bias
        packed = torch.empty(round(NF4 * linear.weight.numel()), dtype=torch.uint8, device=linear.weight.device)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        product = _Dequantised.apply(inputs, self.weight, self.shape)
        return product if self.bias is None else product + self.bias


def _model(cell: Cell) -> Qwen2ForCausalLM:
    config = Qwen2Config(**{"max_position_embeddings": 32768} | cell.config, attn_implementation="sdpa")
    with torch.device("meta"):
        causal = Qwen2ForCausalLM(config).to(torch.bfloat16)
    if cell.mode != "full":  # not within the context: PEFT leaves adapters that begin there in fp32
        lora = LoraConfig(r=16, target_modules="all-linear")
        causal = get_peft_model(causal, lora, autocast_adapter_dtype=False).get_base_model()
    if cell.mode == "4bit":
        for layer in [module for module in causal.modules() if isinstance(module, LoraLayer)]:
            with torch.device("meta"):
                layer.base_layer = FourBit(layer.base_layer)
    return causal


@contextmanager
def _no_look_at_masks() -> Iterator[None]:
    """transformers asks whether all of a mask is True, which a fake tensor does not know; here it always is."""
    with MonkeyPatch.context() as patch:
        patch.setattr(transformers.masking_utils, "_ignore_causal_mask_sdpa", lambda *_, **__: True)
        yield


def counted_peak(cell: Cell) -> int:
    """Bytes at the fullest moment of one forward and backward pass, engine included."""
    completions, causal = cell.completions(), _model(cell)
    rows = pack_groups(completions, device=CPU) if cell.shared else pack(completions, pad_id=0, device=CPU)
    memory = PeakMemory(CPU)  # counts what there is: before the first fake tensor
    assert memory.storages is not None
    real = memory.storages.held
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, _no_look_at_masks():
        causal = causal.to_empty(device="cpu").train()
        causal.tie_weights()
        if cell.shared:
            causal.set_attn_implementation(shared_prefix.NAME)
        if cell.checkpointing:
            causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        scorer = TokenScorer(causal, 1.0)
        rows = PackedRows(*(fake.from_tensor(part) if isinstance(part, Tensor) else part for part in rows))
        with memory:
            for weight in (*scorer.parameters(), *scorer.buffers()):
                memory.storages._count(weight)
            trained = [parameter for parameter in scorer.parameters() if parameter.requires_grad]
            total = sum(parameter.numel() for parameter in trained)
            engine, seen = [torch.empty(3, total)], []

            def reduced(parameter: nn.Parameter) -> None:
                if not seen:
                    engine.extend((torch.empty(BUCKET, dtype=torch.bfloat16), torch.empty(min(BUCKET, total))))
                if sum(seen) <= BUCKET < sum(seen) + parameter.numel():
                    engine.append(torch.empty(total))
                seen.append(parameter.numel())
                if parameter.numel() <= BUCKET:
                    parameter.grad = None

            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(reduced)
            reference = None
            if cell.exact:
                reference = torch.empty(len(rows.targets), causal.config.hidden_size, dtype=torch.bfloat16)
            scores = scorer(rows, reference)
            (scores["logps"].sum() + scores["exact_kl"].sum()).backward()
            return memory.take_peak() - real
