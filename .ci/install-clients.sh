#!/usr/bin/env bash
# Installs the Python packages of tests from PyPI into target/clients, and prints that folder: clients of the server, readers of trials. Needs
# Python 3.10 and 0.7 GiB. Does nothing but print when these versions are there already.
set -euo pipefail
cd "$(dirname "$0")/.."

openai=3.54.0  # what tests/clients/openai_client.py is written for
lm_eval=0.4.13 # tests/clients/lm_eval_client.py
benchy=0.4.0   # tests/clients/llama_benchy_client.py: a load generator
# What lm-eval's model of an API imports. Its other requirements are for metrics of other tasks, and are larger than all of these.
needed=(datasets==5.2.0 sacrebleu==2.6.0 requests aiohttp tenacity jinja2 tqdm)
# What llama-benchy imports beside these. Its requirement of transformers is for models without a `tokenizer.json`.
needed+=(tokenizers==0.23.3 tabulate)
# How flywheel/README.md reads the trials, beside pandas, which datasets brings.
readers=(zstandard==0.25.0 duckdb==1.4.2)
folder=$PWD/target/clients

if [[ ! -d $folder/openai-$openai.dist-info || ! -d $folder/lm_eval-$lm_eval.dist-info || ! -d $folder/llama_benchy-$benchy.dist-info || ! -d $folder/duckdb ]]; then
    # Installed beside and moved: an interrupted download leaves nothing that looks complete.
    mkdir -p target
    partial=$(mktemp -d "$PWD/target/clients.XXXXXX")
    trap 'rm -rf "$partial"' EXIT
    install=(python3 -m pip install --quiet --no-compile --disable-pip-version-check --target "$partial")
    "${install[@]}" "openai==$openai" "${needed[@]}" "${readers[@]}" >&2
    "${install[@]}" --no-deps "lm-eval==$lm_eval" "llama-benchy==$benchy" >&2
    rm -rf "$folder"
    mv "$partial" "$folder"
    chmod 755 "$folder"
fi
echo "$folder"
