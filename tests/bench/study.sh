#!/bin/sh
# Cold against warm: what a corpus is worth to a model that it has not seen.
# Campaigns of MANIFEST with several seeds, each alone and then each with CORPUS beside it; prints a table, writes plots.
#   tests/bench/study.sh MANIFEST CORPUS.csv [SEEDS [TRIALS [TARGET]]]
set -eu
manifest=$1 corpus=$2 seeds=${3:-5} trials=${4:-20} target=${5:-}
monobloc=${MONOBLOC:-target/release/monobloc}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
seed=1
while [ "$seed" -le "$seeds" ]; do
  for kind in cold warm; do
    mkdir -p "$work/$kind$seed"
    # A campaign is named by its seed: those of the warm ones begin at 1001.
    own=$seed
    if [ "$kind" = warm ]; then
      own=$((seed + 1000))
      mkdir "$work/warm$seed/corpus"
      cp "$corpus" "$work/warm$seed/corpus/"
    fi
    "$monobloc" tune "$manifest" ${target:+--target "$target"} --seed "$own" --max-trials "$trials" \
      --trials "$work/$kind$seed/trials.csv" --cache "$work/cache" >&2
  done
  seed=$((seed + 1))
done
"$monobloc" flywheel study "$work"/cold*/trials.csv --warm "$work"/warm*/trials.csv --plots docs/study
