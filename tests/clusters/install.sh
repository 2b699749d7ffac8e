#!/usr/bin/env bash
# Installs what the tests of this folder need besides: Slurm and podman, by Debian's packages (as root), and Python's.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y --no-install-recommends slurm-wlm munge podman runc catatonit netavark aardvark-dns iptables
"$1" -m pip install -qq --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[clusters,ray]'
