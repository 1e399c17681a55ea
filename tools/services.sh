#!/usr/bin/env bash
# The services' own clients against the tests' server, and a real judge: SmolLM2-135M behind `transformers serve`.
# What both need lies in a folder of its own beside .venv.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
. tools/environment.sh

clients=.cache/clients wanted=$(cksum <tests/peer/requirements-services.txt)
if [ "$(cat "$clients/installed" 2>/dev/null)" != "$wanted" ]; then
    rm -rf "$clients"
    pip_install --target "$clients" -r tests/peer/requirements-services.txt
    echo "$wanted" >"$clients/installed"
fi
.venv/bin/python tools/smollm2.py .cache/smollm2 || exit 1
export ZERO_GRPO_CLIENTS="$PWD/$clients" ZERO_GRPO_SMOLLM2="$PWD/.cache/smollm2"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec .venv/bin/python -m pytest -m peer tests/peer/test_services.py "$@"
