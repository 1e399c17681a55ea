#!/usr/bin/env bash
# The whole job in one command: environment, a tiny model made and taught offline, then a real GRPO training on two ranks.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh

model=.cache/demo-model
made_by=$(cksum <tools/tiny_model.py)
if [ "$(cat $model/made_by 2>/dev/null)" != "$made_by" ]; then
    rm -rf $model
    .venv/bin/python tools/tiny_model.py $model
    echo "$made_by" >$model/made_by
fi

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Two ranks on the CPU, unless there is a card on which torch can compute.
ranks=(--gpus 2 --engine.device cpu)
if .venv/bin/python -c 'import torch; torch.ones(1, device="cuda").add(1).item()' 2>/dev/null; then ranks=(--gpus 1); fi
# exec: Ctrl-C reaches the training, which ends its ranks.
exec .venv/bin/zero-grpo train launch/recipes/demo.toml "${ranks[@]}" --run.dir "runs/demo-$(date +%Y%m%d-%H%M%S)"
