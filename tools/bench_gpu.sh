#!/usr/bin/env bash
# tools/bench.py on a GPU, each side held to the 22 GiB that a 24 GB card leaves: Qwen2.5-1.5B with LoRA in bf16.
# PYTHON=... takes an environment that has everything, TRL too; else .venv and .cache/peer are made. Takes some 6
# minutes beside that, by estimate: it has run on no card yet.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
python=${PYTHON-}
if [ -z "$python" ]; then
    tools/peer.sh --collect-only -q >/dev/null || exit 2
    python=.venv/bin/python
fi
cards=${CUDA_VISIBLE_DEVICES:-0}
export CUDA_VISIBLE_DEVICES=${cards%%,*} # with several, TRL's side would spread over all of them
exec "$python" tools/bench.py --shape qwen2.5-1.5b --lora 16 --dtype bf16 --device cuda --memory-gib 22 \
    --prompts 4 --prompt 512 --completion 128 --group 8 --repeats 3 --threads "$(nproc)" "$@"
