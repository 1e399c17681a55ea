# Makes .venv in the project root as requirements.lock says, or leaves it alone when it already is.
# Sourced by launch/demo.sh and tools/check.sh; the caller stands in the project root.

fail() { printf '%s\n' "$@" >&2; exit 2; }

find_python() {
    local name
    for name in python3.11 python3.12 python3.13 python3 python; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$name"; return; fi
    done
    fail "Python 3.11 or newer is needed; found none as python3.11, python3.12, python3.13, python3 or python on PATH."
}

# Runs pip quietly; when it fails, its own last lines are the message.
pip_install() {
    local log
    log=$(mktemp)
    if ! .venv/bin/python -m pip --disable-pip-version-check install --quiet --progress-bar off "$@" >"$log" 2>&1; then
        tail -n 15 "$log" >&2; rm -f "$log"
        fail "pip install $* failed; its last lines are above. What is installed stays, so running again goes on from here."
    fi
    rm -f "$log"
}

make_environment() {
    local python wanted stamp=.venv/zero-grpo.stamp started=$SECONDS
    wanted=$(cat requirements.lock requirements.hashes pyproject.toml tools/environment.sh | cksum)
    if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then return; fi

    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        python=$(find_python) || exit $?
        echo "environment: making .venv with $("$python" --version)"
        "$python" -m venv .venv || fail "$python -m venv .venv failed; on Debian or Ubuntu: apt install python3-venv"
    fi
    .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail ".venv holds $(.venv/bin/python --version), Python 3.11 or newer is needed: remove .venv and run again."
    command -v c++ >/dev/null || fail "A C++ compiler is needed (DeepSpeed builds its CPU kernels): no c++ on PATH." \
        "On Debian or Ubuntu: apt install build-essential"
    .venv/bin/python -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        fail "Python's C headers are needed (DeepSpeed builds its CPU kernels): Python.h is missing." \
            "On Debian or Ubuntu: apt install python3-dev"

    echo "environment: installing requirements.lock into .venv (minutes when it is new, seconds when it is complete)"
    pip_install --no-deps --require-hashes -r requirements.hashes
    # torch alone has no hash, since its builds differ by machine, and may bring what the lock does not name: on a machine
    # with an NVIDIA card, the CUDA libraries of its build. Last, so that all it needs beside them is there, hashed.
    pip_install "$(grep '^torch==' requirements.lock)"
    pip_install --no-deps -r requirements.lock
    pip_install --no-deps --editable .
    echo "$wanted" >"$stamp"
    echo "environment: ready after $((SECONDS - started)) s"
}

make_environment
