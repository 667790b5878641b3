#!/usr/bin/env bash
# Installs the programs that tests of deployment, gateways and the live page need, where the system's
# packages can be had; what cannot be installed is named, and its tests are skipped.
set -uo pipefail

missing=()
for pair in curl:curl redis-server:redis-server promtool:prometheus chromium:chromium systemd-analyze:systemd kubectl:kubernetes-client; do
  command -v "${pair%%:*}" > /dev/null || missing+=("${pair##*:}")
done
# By themselves: not every release has them, and one unknown name keeps apt-get from all of them.
gateways=()
for module in js lua; do
  [ -e "/usr/lib/nginx/modules/ngx_http_${module}_module.so" ] || gateways+=(nginx "libnginx-mod-http-$module")
done

as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo -n)
install() {
  [ $# -gt 0 ] || return 0
  command -v apt-get > /dev/null &&
    "${as_root[@]}" timeout 120 apt-get update -qq &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 timeout 420 \
      apt-get install --yes -qq --no-install-recommends "$@" > /dev/null ||
    echo "not installed, since the system's packages cannot be had here: $*" >&2
}
install "${missing[@]}"
install "${gateways[@]}"
exit 0
