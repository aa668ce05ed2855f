#!/usr/bin/env bash
# Installs the engines of tests of searches over many machines into target/schedulers, and prints that folder: Ray from PyPI, Slurm from the
# packages of Debian or Ubuntu. Needs no root, and 0.3 GiB. Does nothing but print when they are there already.
set -euo pipefail
cd "$(dirname "$0")/.."

ray=2.60.0
folder=$PWD/target/schedulers

if [[ ! -d $folder/python/ray-$ray.dist-info || ! -e $folder/slurm/usr/sbin/slurmctld-wlm ]]; then
    # Installed beside and moved: an interrupted download leaves nothing that looks complete.
    mkdir -p target
    partial=$(mktemp -d "$PWD/target/schedulers.XXXXXX")
    trap 'rm -rf "$partial"' EXIT
    python3 -m pip install --quiet --no-compile --disable-pip-version-check --target "$partial/python" "ray==$ray" >&2
    mkdir -p "$partial/deb" "$partial/slurm"
    # Those, and the libraries that this machine lacks for them.
    wanted=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins)
    needed=$(apt-get install --simulate --no-install-recommends "${wanted[@]}" | awk '/^Inst/ { print $2 }')
    (cd "$partial/deb" && printf '%s\n' "${wanted[@]}" $needed | sort -u | xargs apt-get download >&2)
    for package in "$partial"/deb/*.deb; do dpkg -x "$package" "$partial/slurm"; done
    rm -rf "$folder" "$partial/deb"
    mv "$partial" "$folder"
    chmod 755 "$folder"
fi
echo "$folder"
