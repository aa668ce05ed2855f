#!/usr/bin/env bash
# Installs the servers of tests of remote caches into target/remotes, and prints that folder: moto (S3) from PyPI, nginx (WebDAV) from the
# packages of Debian or Ubuntu. Needs no root, and 0.1 GiB. Does nothing but print when they are there already.
set -euo pipefail
cd "$(dirname "$0")/.."

moto=5.2.1
folder=$PWD/target/remotes

if [[ ! -d $folder/python/moto-$moto.dist-info || ! -x $folder/nginx/usr/sbin/nginx ]]; then
    # Installed beside and moved: an interrupted download leaves nothing that looks complete.
    mkdir -p target
    partial=$(mktemp -d "$PWD/target/remotes.XXXXXX")
    trap 'rm -rf "$partial"' EXIT
    # What its server of S3 imports; the extra `server` is for all services, and ten times as large.
    python3 -m pip install --quiet --no-compile --disable-pip-version-check --target "$partial/python" \
        "moto[s3]==$moto" flask flask-cors >&2
    mkdir -p "$partial/deb" "$partial/nginx"
    # Ubuntu has the program in `nginx`, Debian 12 in `nginx-light` or `nginx`.
    (cd "$partial/deb" && apt-get download nginx libnginx-mod-http-dav-ext libxslt1.1 libxml2 >&2)
    for package in "$partial"/deb/*.deb; do dpkg -x "$package" "$partial/nginx"; done
    rm -rf "$folder" "$partial/deb"
    mv "$partial" "$folder"
    chmod 755 "$folder"
fi
echo "$folder"
