#!/usr/bin/env bash
# Installs maturin, numpy and pytest from PyPI into target/python, and prints their folder: tools of .ci/test-python.sh. Does nothing but print
# when these versions are there already.
set -euo pipefail
cd "$(dirname "$0")/.."

maturin=1.16.0
numpy=2.4.6
pytest=9.2.0
folder=$PWD/target/python
tools=$folder/tools

if [[ ! -d $tools/maturin-$maturin.dist-info || ! -d $tools/numpy-$numpy.dist-info || ! -d $tools/pytest-$pytest.dist-info ]]; then
    # Installed beside and moved: an interrupted download leaves nothing that looks complete.
    mkdir -p "$folder"
    partial=$(mktemp -d "$folder/tools.XXXXXX")
    trap 'rm -rf "$partial"' EXIT
    python3 -m pip install --quiet --no-compile --disable-pip-version-check --target "$partial" \
        "maturin==$maturin" "numpy==$numpy" "pytest==$pytest" >&2
    rm -rf "$tools"
    mv "$partial" "$tools"
    chmod 755 "$tools"
fi
echo "$tools"
