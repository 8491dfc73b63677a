#!/bin/sh
# Debian's or Ubuntu's package of Prometheus, unpacked into FOLDER (default: build/prometheus) and not installed, so
# that no service starts and no root is needed: FOLDER/usr/bin/prometheus and promtool, for `make monitoring`.
#
#   scripts/prometheus.sh [FOLDER]
set -eu
cd "$(dirname "$0")/.."
folder=${1:-build/prometheus}
[ ! -x "$folder/usr/bin/promtool" ] || exit 0
command -v apt-get >/dev/null || {
  echo "no apt-get here: put Prometheus's programs into $folder/usr/bin" >&2
  exit 1
}
mkdir -p "$folder"
(
  cd "$folder"
  apt-get download -q prometheus 2>/dev/null || { # as on a machine that never updated its lists
    apt-get update -qq
    apt-get download -q prometheus
  }
)
dpkg-deb -x "$folder"/prometheus_*.deb "$folder"
rm "$folder"/prometheus_*.deb
"$folder/usr/bin/promtool" --version
