#!/usr/bin/env bash
# The memory plan beside torch.cuda.max_memory_allocated, on a GPU held to the 22 GiB that a 24 GB card leaves: two
# steps each of Qwen2.5-1.5B's shape with random weights. A case that runs out of memory ends it.
# PYTHON=... takes an environment that has everything; else .venv.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-.venv/bin/python}" -m tools.memory --device cuda --memory-gib 22 "$@"
