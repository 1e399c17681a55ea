"""The sections of a run file around the algorithm: run, model, data, optimizer, engine and upkeep."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue, Strict

from trainer.config.section import SEED_MAX, Section, Texts


class Run(Section):
    dir: str = Field(
        default="",
        description="Directory that the run writes. Needed by `train`; no default, so that no run lands in another's.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=SEED_MAX,
        description="Seed of sampling and of new LoRA weights. Fixed, so that a run can be repeated.",
    )
    steps: int = Field(default=0, ge=0, le=10**9, description="Rollout steps to train. Give either this or run.epochs.")
    epochs: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="Passes over the prompts, may be a fraction. Give either this or run.steps.",
    )
    grace_seconds: float = Field(
        default=150.0,
        gt=0,
        description=(
            "Seconds that ranks which --gpus or --hostfile has started get to save after a SIGTERM, before they are "
            "ended. 150: within the 180 that launch/slurm.sbatch asks for."
        ),
    )


class Rope(Section):
    type: Literal["", "linear", "dynamic", "yarn"] = Field(
        default="",
        description='RoPE scaling asked for. "" leaves what the checkpoint has: scaling costs quality on short texts.',
    )
    factor: float = Field(default=0.0, ge=0, description="Scaling factor, at least 1. 0: none asked.")
    original_max_position_embeddings: int = Field(
        default=0,
        ge=0,
        description="Tokens of the window before yarn scaling. 0: the checkpoint's max_position_embeddings.",
    )


class Model(Section):
    name_or_path: str = Field(min_length=1, description="Folder of a checkpoint, or a name on the Hugging Face hub.")
    revision: str = Field(
        default="", description='Branch, tag or commit on the hub. "": the main branch; pin it to repeat a run.'
    )
    dtype: Literal["auto", "bf16", "fp32", "fp16"] = Field(
        default="auto",
        description=(
            'Precision of the forward and backward pass. "auto": bf16 on a GPU, fp32 on a CPU. fp16 is refused.'
        ),
    )
    attn: Literal["sdpa", "eager", "flash_attention_2"] = Field(
        default="sdpa", description="Attention of the model. sdpa ships with torch and needs no extra package."
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that a checkpoint brings. Off: it is someone else's code."
    )
    gguf_file: str = Field(default="", description="GGUF file inside name_or_path, read as full-precision weights.")
    rope: Rope = Field(default_factory=Rope, description="RoPE scaling, applied alike to policy and reference.")


class Lora(Section):
    r: int = Field(default=16, ge=0, description="Rank. 0: full fine-tuning. 16 fits a 1.5B model on a 24 GB card.")
    alpha: float = Field(
        default=32.0, gt=0, description="Scale of the update is alpha / r. 32: twice the rank, the common choice."
    )
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Without effect, and said so: with dropout, scored and sampled log-probs would differ.",
    )
    targets: Texts = Field(
        default=("all-linear",),
        min_length=1,
        description='Names of the modules that get an adapter. "all-linear": every linear layer but the head.',
    )
    start_adapter: str = Field(default="", description='Folder of a PEFT adapter to start from. "": a new one.')


class Quant(Section):
    bits: Literal[0, 4] = Field(
        default=0, description="Bits of the frozen base weights under the adapter (bitsandbytes). 0: not quantised."
    )
    type: Literal["nf4"] = Field(default="nf4", description="4-bit data type; nf4 suits normally distributed weights.")
    double_quant: bool = Field(default=True, description="Quantise the scales too: 0.4 bit a weight less.")


class Data(Section):
    source: str = Field(
        default="",
        description=(
            "Prompts: a .jsonl, .json, .csv or .parquet file, a folder, a data set on the hub, or"
            ' "reasoning_gym:TASK?arg=value". Needed unless rollout.replay is given.'
        ),
    )
    config: str = Field(default="", description='Configuration of a hub data set, for example "main".')
    split: str = Field(default="train", min_length=1, description="Split to train on.")
    eval_source: str = Field(
        default="", description='Prompts of the evaluation. "": data.source, when eval_split or eval_fraction is given.'
    )
    eval_split: str = Field(default="", description="Split to evaluate on.")
    eval_fraction: float = Field(
        default=0.0, ge=0, lt=1, description="Share of the prompts held out for evaluation, drawn with data.seed."
    )
    prompt_column: str = Field(
        default="",
        description=(
            'Column of the prompt: a string or a list of messages. "": the one called prompt, query, question, problem,'
            " messages, input or instruction."
        ),
    )
    answer_column: str = Field(
        default="",
        description=(
            'Column of the right answer, given to rewards as `answer`. "": the one called answer, reference_answer,'
            " chosen, label, solution, target or output, where there is one."
        ),
    )
    system: str = Field(default="", description='System message put before each prompt. "": none added.')
    chat_template: Literal["auto", "on", "off"] = Field(
        default="auto",
        description=(
            'Render string prompts as a user message with the tokenizer\'s chat template; messages always are. "auto":'
            " when the model is a chat model, that is, when the token that ends a turn of its template is an end token"
            " it declares."
        ),
    )
    chat_template_kwargs: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Further arguments of the chat template, for example {enable_thinking = false}.",
    )
    max_prompt_tokens: int = Field(
        default=512, ge=1, description="Longest prompt, template included (tokens). 128 cuts most real prompts."
    )
    overlong: Literal["error", "drop", "truncate_left"] = Field(
        default="error", description="What happens to a longer prompt. error: nothing is left out unasked."
    )
    bad_rows: Literal["error", "skip"] = Field(
        default="error", description="What happens to a row that cannot be read. error: nothing is left out unasked."
    )
    seed: int = Field(
        default=0, ge=0, le=SEED_MAX, description="Seed of the order of the prompts and of eval_fraction."
    )


class Optim(Section):
    name: Literal["adamw", "adamw8bit", "sgd"] = Field(
        default="adamw",
        description=(
            "Optimizer. adamw; DeepSpeed's CPU Adam where it is offloaded. adamw8bit: bitsandbytes' AdamW, moments of 2"
            " bytes a parameter, not 8; they are rounded in blocks of a rank's shard, so that the update depends a"
            " little on ranks and stage."
        ),
    )
    lr: float = Field(
        default=2e-5, gt=0, description="Peak learning rate. 2e-5 suits LoRA; full fine-tuning takes about 1e-6."
    )
    betas: Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Strict(False)] = (
        Field(default=(0.9, 0.999), description="Decay of AdamW's two moments.")
    )
    eps: float = Field(default=1e-8, gt=0, description="AdamW's denominator term.")
    weight_decay: float = Field(
        default=0.0, ge=0, description="Decoupled weight decay. 0: it moves weights even where no advantage does."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Learning rate after the warm-up. constant: such a run can be extended."
    )
    warmup_steps: int = Field(
        default=10, ge=0, description="Optimizer steps of linear warm-up. 10: Adam's second moment is noise at first."
    )
    max_grad_norm: float = Field(default=1.0, ge=0, description="Clip the gradient to this norm. 0: off.")


class Engine(Section):
    deepspeed: str = Field(
        default="zero2",
        min_length=1,
        description=(
            'ZeRO configuration: "zero0" .. "zero3", "zero2-offload", "zero3-offload", or the path of a DeepSpeed'
            " .json. zero2: shards gradients and optimizer at no extra communication."
        ),
    )
    device: Literal["auto", "cpu"] = Field(default="auto", description='"auto": the GPU where there is one.')
    micro_batch: int = Field(
        default=0,
        ge=0,
        description=(
            "Completions in one forward and backward pass of a rank. 0: by token_budget. Changes memory and speed,"
            " never the update."
        ),
    )
    token_budget: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description=(
            'Tokens in one forward and backward pass of a rank. "auto": as many as fit by the memory plan, and bring'
            " speed. Changes memory and speed, never the update."
        ),
    )
    gradient_checkpointing: Literal["auto", "on", "off"] = Field(
        default="auto",
        description=(
            'Recompute activations in the backward pass: less memory, a third more compute. "auto": off where the step'
            " is quicker without, by the memory plan (`zero-grpo plan`)."
        ),
    )


class Reference(Section):
    mode: Literal["auto", "adapter", "cpu", "gpu", "zero3"] = Field(
        default="auto",
        description=(
            "Where the reference model lives. auto: LoRA switches its adapter off (no second copy); full fine-tuning"
            " keeps a copy in CPU memory (2 bytes a parameter and rank in bf16), whose layers pass through the GPU two"
            " at a time, once a step. gpu: the copy stays there. zero3: one copy in the CPU memory of all ranks, whose"
            " layers are gathered in every pass."
        ),
    )


class Checkpoint(Section):
    every: int = Field(
        default=50,
        ge=0,
        description=(
            "Steps between checkpoints; one more after the last step. 50: the most that a kill can cost. 0: only when"
            " the run is stopped."
        ),
    )
    keep: int = Field(
        default=3,
        ge=1,
        description="Checkpoints to keep, the newest ones. The one resumed from and the best one stay besides.",
    )
    verify: Literal["full", "size"] = Field(
        default="full",
        description=(
            "What is checked of a checkpoint's files before one is loaded. full: the SHA-256 of each; size: its size"
            " alone, where reading all of it takes too long. What pickles name is checked always."
        ),
    )


class Eval(Section):
    every: int = Field(default=0, ge=0, description="Steps between evaluations. 0: none.")
    num_generations: int = Field(default=4, ge=1, description="Completions a prompt of an evaluation.")
    correct_at: float = Field(
        default=1.0,
        description=(
            "The reward from which a completion counts as correct, for pass@k: the weighted sum, and each reward by"
            " itself. 1: what a checker gives."
        ),
    )
    best_metric: Literal["", "sampled", "greedy"] = Field(
        default="",
        description='Held-out mean reward whose best checkpoint is saved and kept: of samples, or greedy. "": none.',
    )


class Log(Section):
    report_to: Annotated[tuple[Literal["tensorboard", "wandb", "trackio", "swanlab"], ...], Strict(False)] = Field(
        default=(), description="Trackers that get the metrics beside metrics.jsonl. None: no account is needed."
    )
    every: int = Field(default=1, ge=1, description="Steps between progress lines.")
    samples_every: int = Field(
        default=20, ge=0, description="Steps between sample files, the completions as text. 0: none."
    )
    histogram_every: int = Field(
        default=0,
        ge=0,
        description="Steps between histograms of the KL of single tokens, as JSON and, with matplotlib, PNG. 0: none.",
    )
    rollouts_every: int = Field(
        default=1, ge=0, description="Steps between rollout files, every completion with ids and rewards. 0: none."
    )


class Hooks(Section):
    before_rollout: Texts = Field(
        default=(), description='Functions called before each rollout, as "package.module:function".'
    )
