#!/usr/bin/env bash
# Installs the Python clients that tests ask the server with from PyPI into target/clients, and prints that folder. Needs
# Python 3.10. Does nothing but print when these versions are there already.
set -euo pipefail
cd "$(dirname "$0")/.."

openai=3.54.0 # what tests/clients/openai_client.py is written for
folder=$PWD/target/clients

if [[ ! -d $folder/openai-$openai.dist-info ]]; then
    # Installed beside and moved: an interrupted download leaves nothing that looks complete.
    mkdir -p target
    partial=$(mktemp -d "$PWD/target/clients.XXXXXX")
    trap 'rm -rf "$partial"' EXIT
    python3 -m pip install --quiet --disable-pip-version-check --target "$partial" "openai==$openai" >&2
    rm -rf "$folder"
    mv "$partial" "$folder"
    chmod 755 "$folder"
fi
echo "$folder"
