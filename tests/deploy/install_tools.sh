#!/usr/bin/env bash
# Installs the programs that tests of deployment and of the live page need, where the system's
# packages can be had; what cannot be installed is named, and its tests are skipped.
set -uo pipefail

missing=()
for pair in redis-server:redis-server promtool:prometheus chromium:chromium systemd-analyze:systemd kubectl:kubernetes-client; do
  command -v "${pair%%:*}" > /dev/null || missing+=("${pair##*:}")
done
[ ${#missing[@]} -gt 0 ] || exit 0

as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo -n)
install() {
  command -v apt-get > /dev/null || return 1
  "${as_root[@]}" timeout 120 apt-get update -qq &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive timeout 420 \
      apt-get install --yes -qq --no-install-recommends "${missing[@]}" > /dev/null
}
install || echo "not installed, since the system's packages cannot be had here: ${missing[*]}" >&2
exit 0
