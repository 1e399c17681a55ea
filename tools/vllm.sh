#!/usr/bin/env bash
# What is exported, in vLLM for CPUs: merged, full, scaled and as an adapter. vLLM has an environment of its own.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
. tools/environment.sh

vllm=.cache/vllm wanted=$(cksum <tests/peer/requirements-vllm.txt)
if [ "$(cat "$vllm/installed" 2>/dev/null)" != "$wanted" ]; then
    rm -rf "$vllm"
    .venv/bin/python -m venv "$vllm" || fail "$vllm cannot be made"
    "$vllm/bin/python" -m pip --quiet install -r tests/peer/requirements-vllm.txt || fail "vLLM cannot be installed"
    # Built for another torch than vLLM's: transformers imports them where they are.
    "$vllm/bin/python" -m pip --quiet uninstall -y torchvision torchaudio torchcodec
    echo "$wanted" >"$vllm/installed"
fi
export ZERO_GRPO_VLLM_PYTHON="$PWD/$vllm/bin/python" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec .venv/bin/python -m pytest -m peer tests/peer/test_vllm.py "$@"
