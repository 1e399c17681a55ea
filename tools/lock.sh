#!/usr/bin/env bash
# Writes requirements.hashes: the SHA-256 of every file that the registry has of each release in requirements.lock, for
# all platforms. Run it after a change of the lock; `uv` does the work (pip install uv). torch has none: which build is
# right is for the machine to say, and it may come from a folder of wheels.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v uv >/dev/null || { echo "tools/lock.sh: no uv on PATH. Fix: pip install uv, in an environment of its own." >&2; exit 2; }
wanted=$(mktemp)
trap 'rm -f "$wanted"' EXIT
grep -v '^torch==' requirements.lock >"$wanted"
{
    echo "# Made by tools/lock.sh from requirements.lock; tools/environment.sh installs by it, with pip's --require-hashes."
    uv pip compile "$wanted" --quiet --no-deps --generate-hashes --no-header --no-annotate --python-version 3.11
} >requirements.hashes.new
mv requirements.hashes.new requirements.hashes
