#!/usr/bin/env bash
# Exported models in earlier releases of transformers, each in a folder of its own beside .venv.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
. tools/environment.sh

folders=""
for version in 4.45.2 4.52.4 4.57.6; do
    folder=.cache/transformers/$version
    if [ ! -e "$folder/installed" ]; then
        rm -rf "$folder"
        pip_install --target "$folder" "transformers==$version"
        touch "$folder/installed"
    fi
    folders="$folders $PWD/$folder"
done
export ZERO_GRPO_TRANSFORMERS="$folders" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec .venv/bin/python -m pytest -m peer tests/peer/test_transformers.py "$@"
