# Every recipe is one cargo command or a short script: `just` is optional.

# Arguments reach the commands as they were typed, blanks and quotes included.
set positional-arguments

# List the recipes
[private]
default:
    @just --list --unsorted

# Build every target of a manifest: just build manifests/tinystories.toml
build manifest *args:
    @cargo run --release -- build "$@"

# Say which stages a build would run, and which input of each has changed
explain manifest *args:
    @cargo run --release -- explain "$@"

# Format, lint and test, as a reviewer would
check:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings
    cargo test --workspace

# What continuous integration runs: `check` with NVRTC, so that kernels are compiled too
ci:
    .ci/run

# Rewrite the golden files of the tests; read the diff before you commit it
bless:
    BLESS=1 cargo test

# Print the figures of the host side as a table; `just host-bench passes import` those parts alone
host-bench *args:
    cargo bench --bench host -- "$@"

# Compare cold searches of a manifest with warm ones: just study MANIFEST CORPUS.csv [SEEDS [TRIALS [TARGET]]]
study manifest corpus *args:
    cargo build --release --quiet
    @tests/bench/study.sh "$@"

# Run the tests on a GPU of this machine; without one they fail instead of being skipped
gpu:
    MONOBLOC_REQUIRE_GPU=1 cargo test --release

# Run the tests of tests/device alone, or those whose name contains a word, and print what they measure
device *args:
    MONOBLOC_REQUIRE_GPU=1 cargo test --release --test device -- --nocapture "$@"
