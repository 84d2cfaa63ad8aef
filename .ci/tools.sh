#!/usr/bin/env bash
# Installs what some tests need beside a compiler and pip: on Debian and Ubuntu, as root. Nowhere
# else, and where it fails, nothing is lost but those tests: they are skipped by name. Starts no
# service.
set -uo pipefail

missing=()
for tool in valgrind redis-server; do # each a command, and the package that has it
    command -v "$tool" > /dev/null || missing+=("$tool")
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" -eq 0 ] && command -v apt-get > /dev/null; then
    export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
    timeout 60 apt-get -qq update > /dev/null &&
        timeout 120 apt-get -qq install -y --no-install-recommends "${missing[@]}" > /dev/null &&
        exit 0
fi
echo "without ${missing[*]}: the tests that need them are skipped" >&2
