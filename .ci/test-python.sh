#!/usr/bin/env bash
# Installs maturin, numpy and pytest from PyPI into target/python, builds the wheel with the profile and the folder of `cargo test
# --workspace`, and tests what users install. Needs Python 3.11; the wheel needs 3.9. Arguments are those of pytest.
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
    python3 -m pip install --quiet --disable-pip-version-check --target "$partial" \
        "maturin==$maturin" "numpy==$numpy" "pytest==$pytest" >&2
    rm -rf "$tools"
    mv "$partial" "$tools"
    chmod 755 "$tools"
fi

# The program is what the package is compared with. Named beside the extension, its packages have the features of the whole workspace:
# none is compiled twice.
cargo build --quiet --locked -p monobloc -p monobloc-python --bin monobloc
rm -rf "$folder/wheels" "$folder/site"
"$tools/bin/maturin" build --quiet --locked --profile dev \
    --manifest-path bindings/python/Cargo.toml --compatibility linux --out "$folder/wheels"
python3 -m pip install --quiet --disable-pip-version-check --no-deps --no-index --target "$folder/site" "$folder"/wheels/*.whl

MONOBLOC_BINARY=${CARGO_TARGET_DIR:-$PWD/target}/debug/monobloc
export MONOBLOC_BINARY
PYTHONPATH=$folder/site:$tools python3 -m pytest -q -p no:cacheprovider bindings/python/tests "$@"
