#!/usr/bin/env bash
# rlprobe and rldoctor into .cache/lab-peers, beside .venv and never into it: all that they need is installed there already.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh
pip_install --no-deps --target .cache/lab-peers rlprobe==0.1.0 rldoctor==0.2.0
