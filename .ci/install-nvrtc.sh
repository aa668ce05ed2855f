#!/usr/bin/env bash
# Installs NVRTC, the CUDA run-time compiler, from PyPI into target/nvrtc, and prints the folder of its libraries.
# Needs no GPU, no driver and no CUDA toolkit. Does nothing but print when that version is there already.
set -euo pipefail
cd "$(dirname "$0")/.."

version=13.0.88 # what src/cuda/nvrtc.rs is tested with
folder=$PWD/target/nvrtc
lib=$folder/nvidia/cu13/lib

if [[ ! -d $folder/nvidia_cuda_nvrtc-$version.dist-info ]]; then
    # Installed beside and moved: an interrupted download leaves nothing that looks complete.
    mkdir -p target
    partial=$(mktemp -d "$PWD/target/nvrtc.XXXXXX")
    trap 'rm -rf "$partial"' EXIT
    python3 -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --target "$partial" \
        "nvidia-cuda-nvrtc==$version" >&2
    rm -rf "$folder"
    mv "$partial" "$folder"
    chmod 755 "$folder"
fi

if ! ls "$lib"/libnvrtc.so.* >/dev/null 2>&1; then
    echo "no libnvrtc in $lib: remove target/nvrtc and run this again" >&2
    exit 1
fi
echo "$lib"
