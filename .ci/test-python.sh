#!/usr/bin/env bash
# Builds the wheel with the profile and the folder of `cargo test --workspace`, and tests what users install. Needs Python 3.11; the wheel
# needs 3.9. Arguments are those of pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$PWD/target/python
tools=$(.ci/install-python-tools.sh)

# The program is what the package is compared with. Named beside the extension, its packages have the features of the whole workspace:
# none is compiled twice.
cargo build --quiet --locked -p monobloc -p monobloc-python --bin monobloc
rm -rf "$folder/wheels" "$folder/site"
"$tools/bin/maturin" build --quiet --locked --profile dev \
    --manifest-path bindings/python/Cargo.toml --compatibility linux --out "$folder/wheels"
python3 -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --no-index --target "$folder/site" "$folder"/wheels/*.whl

MONOBLOC_BINARY=${CARGO_TARGET_DIR:-$PWD/target}/debug/monobloc
export MONOBLOC_BINARY
PYTHONPATH=$folder/site:$tools python3 -m pytest -q -p no:cacheprovider bindings/python/tests "$@"
