#!/usr/bin/env bash
# Create the virtual environment: setup.sh PYTHON VENV
# SGLang's declared requirements pull a CUDA stack of many GB; requirements/ holds what its CPU
# engine really needs.
set -euo pipefail
python=$1 venv=$2
cd "$(dirname "${BASH_SOURCE[0]}")/.."

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: Python 3.11 or newer is needed, $python is $("$python" --version 2>&1);" \
        "run: make setup PYTHON=/path/to/python3.11" >&2
    exit 1
}
step() { printf '[setup %s/5, %ss] %s\n' "$1" "$SECONDS" "$2"; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet --no-input "$@"; }

step 1 "virtual environment in $venv"
"$python" -m venv "$venv"
step 2 "torch (CPU build) and SGLang's requirements, about 2 GB: a minute or two"
pip install -c requirements/constraints-cpu.txt -r requirements/cpu.txt
step 3 "SGLang 0.5.23 and the packages whose requirements ask for CUDA"
pip install --no-deps -r requirements/cpu-nodeps.txt
step 4 "test and plot tools"
pip install -c requirements/constraints-cpu.txt -r requirements/dev.txt 2> >(grep -v "dependency\|requires" >&2)
step 5 "dcut_sglang, editable"
pip install --no-deps -e .
step 5 "done"
