#!/usr/bin/env bash
# Environment, lint, format, types, then every test: those that start ranks one by one, the others beside them.
# --full adds the tests marked `full` (matrices, kill sweeps, soaks), which write tests/results/*.json.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
case "${1-}" in
    "") marked="not full" ;;
    --full) marked="" ;;
    *) echo "usage: tools/check.sh [--full]" >&2; exit 2 ;;
esac
. tools/environment.sh

# One thread a process: the distributed tests start several, and more threads than cores slow all of them.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
status=0
part() {
    echo "== $*"
    .venv/bin/python -m "$@" || { status=1; echo "FAILED: $*"; }
}
part ruff check .
part ruff format --check .
part mypy trainer
# Unit tests fill the cores while ranks wait: one worker more than cores, and first what takes longest.
# getconf, since nproc would count OMP_NUM_THREADS.
cores=$(getconf _NPROCESSORS_ONLN)
part pytest -m "$marked" tests/dist tests/cluster tests/browser tests/unit \
    --numprocesses "$((cores < 4 ? cores + 1 : 5))" --dist loadfile --no-loadscope-reorder
exit $status
