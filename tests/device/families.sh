#!/usr/bin/env bash
# Compares every checkpoint below tests/fixtures with its goldens on one target, in fp32 and in bf16: one line each.
#
#   tests/device/families.sh [RECORD]      a builtin target or the path of a record; default h200; `cpu` needs no GPU
#
# Kernels are compiled first, on all cores and with no device in sight, and then run a few at a time, so that the GPU is
# needed for a minute or two. MONOBLOC names the binary (default target/release/monobloc), FIXTURES the folder of the
# checkpoints, JOBS how many share the GPU (default 3). Exit code 1: something differs, was refused, or was not refused.
set -uo pipefail
cd "$(dirname "$0")/../.."

record=${1:-h200}
export MONOBLOC=${MONOBLOC:-target/release/monobloc}
export FIXTURES=${FIXTURES:-tests/fixtures}
export WORK
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
touch "$WORK/first"
[ -x "$MONOBLOC" ] || { echo "no binary at $MONOBLOC: cargo build --release"; exit 3; }
# A record of one's own, seen from the folder of the manifests.
[ -e "$record" ] && record=$(realpath "$record")

jobs=()
for config in "$FIXTURES"/{families,variants,dense}/*/config.json; do
    checkpoint=$(realpath "$(dirname "$config")")
    name=$(basename "$(dirname "$checkpoint")")/$(basename "$checkpoint")
    [ "$name" = families/qwen3-moe ] && continue
    # Room for 24 positions and 16 tokens, or what the checkpoint was made for.
    made_for=$("$MONOBLOC" import "$checkpoint" --dry-run --json 2> "$WORK/refused" |
        sed -n 's/.*"positions_max": *\([0-9]*\).*/\1/p')
    if [ -z "$made_for" ]; then
        echo "FAIL $name: $(tr '\n' ' ' < "$WORK/refused")" >> "$WORK/first"
        continue
    fi
    context=$((made_for < 48 ? made_for : 48))
    for weights in fp32 bf16; do
        job=${name/\//-}-$weights
        # Launches of seven steps end in the middle of everything.
        printf '[model]\nsource = "path:%s"\n[precision]\nweights = "%s"\n[decode]\ncontext_max = %d\nsteps_per_launch = %d\n[[target]]\nrecord = "%s"\n' \
            "$checkpoint" "$weights" "$context" $((context < 7 ? context : 7)) "$record" > "$WORK/$job.toml"
        echo "$name $weights" > "$WORK/$job.name"
        echo "$checkpoint/goldens.safetensors" > "$WORK/$job.goldens"
        jobs+=("$job")
    done
done

monobloc() {
    "$MONOBLOC" --cache "$WORK/cache" --trials "$WORK/trials.csv" "$@"
}
prepare_one() {
    CUDA_VISIBLE_DEVICES='' monobloc build --quiet "$WORK/$1.toml" > "$WORK/$1.build" 2>&1
}
compare_one() {
    local answer
    if answer=$(timeout 60 "$MONOBLOC" --cache "$WORK/cache" compare "$WORK/$1.toml" \
        --goldens "$(cat "$WORK/$1.goldens")" 2> "$WORK/$1.err"); then
        echo "ok   $(cat "$WORK/$1.name"): $answer"
    else
        echo "FAIL $(cat "$WORK/$1.name"): $answer $(grep -v '^ *run ' "$WORK/$1.err" | head -5 | tr '\n' ' ')"
    fi
}
export -f monobloc prepare_one compare_one

began=$SECONDS
if [ "$record" != cpu ]; then
    printf '%s\n' "${jobs[@]}" | xargs -P "$(nproc)" -I{} bash -c 'prepare_one {}'
    echo "prepared ${#jobs[@]} kernels in $((SECONDS - began)) s"
fi
began=$SECONDS
printf '%s\n' "${jobs[@]}" | xargs -P "${JOBS:-3}" -I{} bash -c 'compare_one {}' > "$WORK/answers"
# Mixtures of experts are there to be refused by name.
refused=$(monobloc import "$FIXTURES/families/qwen3-moe" --dry-run 2>&1)
case "$refused" in
*Qwen3MoeForCausalLM*) answer="ok   families/qwen3-moe: refused by name" ;;
*) answer="FAIL families/qwen3-moe: not refused by name" ;;
esac
echo "$answer" >> "$WORK/first"
sort -k2 "$WORK/first" "$WORK/answers" | tee "$WORK/all"
failed=$(grep -c '^FAIL' "$WORK/all")
echo "$(grep -c '^ok' "$WORK/answers") of ${#jobs[@]} agree on $(basename "$record"), in $((SECONDS - began)) s; $failed failed"
[ "$failed" = 0 ] && [ "$(wc -l < "$WORK/answers")" = "${#jobs[@]}" ] && [ "${#jobs[@]}" != 0 ]
