#!/usr/bin/env bash
# Loss and gradient against TRL's GRPOTrainer, written to tests/results/peer-trl.json.
# TRL goes into .cache/peer, beside .venv and never into it: all that it needs is installed there already.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
. tools/environment.sh

peer=.cache/peer wanted=$(cksum <tests/peer/requirements.txt)
if [ "$(cat "$peer/installed" 2>/dev/null)" != "$wanted" ]; then
    rm -rf "$peer"
    pip_install --no-deps --target "$peer" -r tests/peer/requirements.txt
    echo "$wanted" >"$peer/installed"
fi
export PYTHONPATH="$PWD/$peer" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TRL_EXPERIMENTAL_SILENCE=1
exec .venv/bin/python -m pytest -m peer tests/peer/test_trl.py "$@"
