#!/usr/bin/env bash
# Create the virtual environment of the peer arm: setup_peer.sh PYTHON VENV
# vLLM asks for other versions of the packages that SGLang needs, so it has an environment of its own.
set -euo pipefail
python=$1 venv=$2
cd "$(dirname "${BASH_SOURCE[0]}")/.."

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup_peer: Python 3.11 or newer is needed, $python is $("$python" --version 2>&1);" \
        "run: make bench-peer PYTHON=/path/to/python3.11" >&2
    exit 1
}
step() { printf '[setup_peer %s/3, %ss] %s\n' "$1" "$SECONDS" "$2"; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet --no-input "$@"; }

step 1 "virtual environment in $venv"
"$python" -m venv "$venv"
step 2 "vLLM's CPU build and torch (CPU build), about 3.5 GB: several minutes"
pip install -r requirements/peer.txt || {
    echo "setup_peer: pip could not install requirements/peer.txt; where it found no torch+cpu," \
        "set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels and run this again" >&2
    exit 1
}
step 3 "without torchvision, torchaudio and torchcodec, whose PyPI builds do not import there"
pip uninstall --yes torchvision torchaudio torchcodec
step 3 "done"
