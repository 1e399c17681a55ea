"""Greedy tokens of vLLM, for every cell of a file. Runs in vLLM's own environment, without the trainer.

Usage: vllm_greedy.py CELLS.json RESULTS.json
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def main() -> None:
    cells = json.loads(Path(sys.argv[1]).read_text())
    found = {}
    for name, cell in cells.items():
        lora = LoRARequest("adapter", 1, cell["adapter"]) if "adapter" in cell else None
        model = LLM(
            cell["model"],
            dtype="float32",
            enforce_eager=True,
            enable_lora=lora is not None,
            max_lora_rank=8,
            max_model_len=cell["window"],
            hf_overrides=cell.get("overrides", {}),
        )
        sampling = SamplingParams(temperature=0, max_tokens=cell["tokens"], ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in cell["prompts"]]
        rows = model.generate(prompts, sampling, lora_request=lora, use_tqdm=False)
        found[name] = [list(row.outputs[0].token_ids) for row in rows]
        del model
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
