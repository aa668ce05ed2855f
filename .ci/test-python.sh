#!/usr/bin/env bash
# Builds the wheel with the profile and the folder of `cargo test --workspace`, and tests what users install. Needs Python 3.11; the wheel
# needs 3.9. Arguments are those of pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$PWD/target/python
tools=$(.ci/install-python-tools.sh)

# The program is what the package is compared with. It is that of the tests, and with `as-tested` all packages of the wheel have the features that
# they have there: none is compiled twice.
cargo test --quiet --locked --workspace --no-run
rm -rf "$folder/wheels" "$folder/site"
"$tools/bin/maturin" build --quiet --locked --profile dev --features as-tested \
    --manifest-path bindings/python/Cargo.toml --compatibility linux --out "$folder/wheels"
python3 -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --no-index --target "$folder/site" "$folder"/wheels/*.whl

MONOBLOC_BINARY=${CARGO_TARGET_DIR:-$PWD/target}/debug/monobloc
export MONOBLOC_BINARY
PYTHONPATH=$folder/site:$tools python3 -m pytest -q -p no:cacheprovider bindings/python/tests "$@"
