#!/usr/bin/env bash
# Train over the hosts of a file: ./launch/multinode.sh HOSTFILE RUN.toml [--include NAME@NAME:0,2] [--section.key value ...]
# Uses the environment you are in, which every host must have at the same path, as run.dir. See launch/README.md.
set -eu
if [ $# -lt 2 ]; then sed -n '2,3s/^# //p' "$0"; exit 2; fi
hostfile=$1
shift
exec python -P -m trainer train "$@" --hostfile "$hostfile"
