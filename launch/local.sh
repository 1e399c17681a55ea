#!/usr/bin/env bash
# Train on the cards of this machine: ./launch/local.sh RUN.toml [--gpus N] [--section.key value ...]
# Uses the environment you are in; without --gpus, every visible card.
set -eu
if [ $# -eq 0 ]; then sed -n '2,3s/^# //p' "$0"; exit 2; fi
case " $* " in
    *" --gpus "* | *" --gpus="*) gpus=() ;;
    *) gpus=(--gpus "$(python -P -c 'import torch; print(max(1, torch.cuda.device_count()))')") ;;
esac
exec python -P -m trainer train "$@" "${gpus[@]}"
