#!/usr/bin/env bash
# A headless Chromium for the test of the web page: prints where it is, and installs one where none is.
#
#   scripts/browser.sh
#
# Takes, in this order: the program that EPD_BROWSER names; one on PATH; as root on Debian its package
# chromium-headless-shell, which stays; else what Playwright downloads, which lies in build/browser.
set -euo pipefail
cd "$(dirname "$0")/.."
names=(chromium-headless-shell chromium google-chrome google-chrome-stable)
folder=$PWD/build/browser
log=build/browser.log

found() { # prints the first of the names that is there and runs
  local name path=""
  for name in ${EPD_BROWSER:+"$EPD_BROWSER"} "${names[@]}"; do
    path=$(command -v "$name") && "$path" --version >/dev/null 2>&1 && echo "$path" && exit 0
  done
  [[ -d $folder ]] || return 0
  path=$(find "$folder" -type f -perm -u+x \
    \( -name headless_shell -o -name chrome-headless-shell -o -name chrome \) -print -quit)
  [[ -n $path ]] && "$path" --version >/dev/null 2>&1 && echo "$path" && exit 0
  return 0
}

has_package() { ((EUID == 0)) && apt-cache policy chromium-headless-shell 2>/dev/null | grep -q 'Candidate: [0-9]'; }

install_package() {
  ((EUID == 0)) && command -v apt-get >/dev/null || return
  has_package || apt-get update -q || return
  has_package || return
  DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends \
    chromium-headless-shell fonts-liberation
}

download() {
  PLAYWRIGHT_BROWSERS_PATH=$folder .venv/bin/python -m playwright install --only-shell chromium
}

found
mkdir -p build
echo "installing Debian's package chromium-headless-shell, if this is root on Debian" >&2
install_package >"$log" 2>&1 || true
found
echo "downloading Chromium by Playwright" >&2
download >>"$log" 2>&1 || true
found
echo "no Chromium that runs is here and none could be installed ($log says why): install one and name it" \
  "in EPD_BROWSER, or run this as root on Debian" >&2
exit 1
