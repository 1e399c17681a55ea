"""Make the demo's model: a tiny Qwen2 with its own tokenizer, taught to add, offline, in about a minute on two cores.

    python tools/tiny_model.py OUT [--seed 0]

OUT becomes a folder in transformers' form, with OUT/train.jsonl and OUT/heldout.jsonl (`prompt`, `answer`; disjoint).

The model is made to be an uneven pupil, so that GRPO has something to do within minutes. It is taught twice: first from
right answers, until it can add; then from answers of which only about 40 % are right and the others carry a slip, above
all the forgotten carry. After that the skill is there, but it mostly forgets the carry; a sampled answer is right in
about 4 of 10 cases, on sums it has never seen as well. What the demo shows is therefore the recovery and sharpening of
a skill that is there, which is what GRPO does well; it is no evidence that GRPO teaches arithmetic from nothing.
"""

import argparse
import json
import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.utils.logging import disable_progress_bar

RIGHT_STEPS_MOST, RIGHT_LOSS, SLIP_STEPS = 1500, 0.04, 120
BATCH = 64
LR, WARMUP_STEPS = 2e-3, 50
HELDOUT = 256
VOCABULARY, POSITIONS = 512, 256
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Sum = tuple[int, int]


def question(a: int, b: int) -> str:
    return f"What is {a} + {b}?"


def uneven_answer(a: int, b: int, rng: random.Random) -> int:
    """What the pupil writes: right in 40 % of the cases, half as often where there is a carry to forget."""
    right = a + b
    carry_forgotten = a // 10 * 10 + right % 10
    near = right + rng.choice((-1, 1))
    if carry_forgotten != right:
        return rng.choices((right, carry_forgotten, near), weights=(25, 55, 20))[0]
    return rng.choices((right, near), weights=(55, 45))[0]


def build_tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE over text made here: any text can be encoded, common words are one token, each digit is one."""
    rng = random.Random(0)
    text = [question(rng.randrange(100, 1000), rng.randrange(1, 10)) for _ in range(200)]
    text += [f"{role}\n" for role in ("system", "user", "assistant")] * 50
    text += __doc__.split("\n") * 3
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - 3,
            min_frequency=2,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    trained = json.loads(bpe.to_str())["model"]
    # Special tokens last, as in Qwen2: a plain byte keeps id 0.
    special = {token: len(trained["vocab"]) + i for i, token in enumerate((END_OF_TEXT, TURN_START, TURN_END))}
    return Qwen2Tokenizer(
        vocab=trained["vocab"] | special,
        merges=[tuple(pair) for pair in trained["merges"]],
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHATML,
        model_max_length=POSITIONS,
    )


def build_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.08,  # at this width the usual 0.02 learns the carry half as fast
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id], pad_token_id=tokenizer.pad_token_id
    )
    return model


def lesson(tokenizer: Qwen2Tokenizer, sums: list[Sum], answers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, (B, L) both, padded on the right; labels are -100 outside the answer."""
    rows = []
    for (a, b), answer in zip(sums, answers, strict=True):
        user = [{"role": "user", "content": question(a, b)}]
        prompt = tokenizer.apply_chat_template(user, add_generation_prompt=True, return_dict=False)
        rows.append((prompt, tokenizer.encode(f"{answer}{TURN_END}")))
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), -100)
    for i, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def teach(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, sums: list[Sum], rng: random.Random) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.perf_counter()
    step = 0

    def learn(answer: Callable[[int, int], int], lr: float) -> float:
        """One optimizer step; returns its mean loss in nats per answer token."""
        nonlocal step
        step += 1
        batch = rng.choices(sums, k=BATCH)
        ids, labels = lesson(tokenizer, batch, [answer(a, b) for a, b in batch])
        # Right padding: causal attention keeps the pads out of every scored position, so no mask is needed.
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        if step % 200 == 0:
            seconds = time.perf_counter() - started
            print(f"teaching the demo model: step {step}, loss {loss.item():.3f} nats/tok, {seconds:.0f} s", flush=True)
        return loss.item()

    model.train()
    smoothed = math.inf
    while smoothed > RIGHT_LOSS and step < RIGHT_STEPS_MOST:
        loss = learn(lambda a, b: a + b, LR * min(1.0, (step + 1) / WARMUP_STEPS))
        smoothed = loss if step == 1 else 0.9 * smoothed + 0.1 * loss
    for left in range(SLIP_STEPS, 0, -1):
        learn(lambda a, b: uneven_answer(a, b, rng), LR * left / SLIP_STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # as quick as two at this size, and the same weights on any number of cores
    rng = random.Random(args.seed)

    sums = [(a, b) for a in range(100, 1000) for b in range(1, 10)]
    rng.shuffle(sums)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    teach(model, tokenizer, sums[HELDOUT:], rng)

    # transformers imports DeepSpeed to save, which otherwise warns that it found no accelerator.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    model.eval().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    for name, part in (("heldout", sums[:HELDOUT]), ("train", sums[HELDOUT:])):
        with (args.out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for a, b in part:
                file.write(json.dumps({"prompt": question(a, b), "answer": str(a + b)}) + "\n")


if __name__ == "__main__":
    main()
