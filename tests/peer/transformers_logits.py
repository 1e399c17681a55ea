"""Logits of exported models, and what their tokenizers and generation configs say, in the transformers on PYTHONPATH.

Usage: transformers_logits.py RESULTS.json IDS NAME ...   (models in NAME/model)
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def main() -> None:
    target, ids, *names = sys.argv[1:]
    found: dict[str, object] = {"version": transformers.__version__}
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(f"{name}/model", torch_dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(f"{name}/model")
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(json.loads(ids))).logits
        found[name] = {
            "logits": logits.tolist(),
            "eos": GenerationConfig.from_pretrained(f"{name}/model").eos_token_id,
            "prompt": tokenizer.apply_chat_template([{"role": "user", "content": "one"}], tokenize=False),
        }
    Path(target).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
