#!/usr/bin/env bash
# Installs the tools of some checks, on Debian and Ubuntu, as root. It does nothing elsewhere. If it
# fails, only the checks that need the tools are skipped, by name. It starts no service.
set -uo pipefail

export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
lists= # "fresh" once the package lists are updated
# Limit of all installations; they usually take one minute.
MINUTES=4

in_time() { # COMMAND...
    local left=$((MINUTES * 60 - SECONDS))
    [ "$left" -gt 0 ] && timeout "$left" "$@" > /dev/null
}

install() { # PACKAGES...: installs those that this system has; names differ between systems
    local known=() package
    [ "$(id -u)" -eq 0 ] && command -v apt-get > /dev/null || return 1
    [ -n "$lists" ] || in_time apt-get -qq update || return 1
    lists=fresh
    for package in "$@"; do
        # No pipe into grep -q: under pipefail the broken pipe would tell of a package that is there
        # that it is not.
        [[ $(apt-cache policy "$package") == *'Candidate: '[^\(]* ]] && known+=("$package")
    done
    [ ${#known[@]} -gt 0 ] || return 1
    in_time apt-get -qq install -y --no-install-recommends "${known[@]}"
}

need() { # COMMAND PACKAGES...
    local tool=$1
    shift
    command -v "$tool" > /dev/null || install "$@" ||
        echo "without $tool ($*): the checks that need it are skipped" >&2
}

need valgrind valgrind
need node nodejs
need chromium chromium
need qemu-aarch64 qemu-user
need aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu libc6-dev-arm64-cross
# A compiler that came without its C library, as where the limit above cut the installation.
if command -v aarch64-linux-gnu-gcc > /dev/null && [ ! -e /usr/aarch64-linux-gnu/include/stdio.h ]; then
    install libc6-dev-arm64-cross ||
        echo 'without libc6-dev-arm64-cross: the checks that need it are skipped' >&2
fi
# On systems with a package of its own for libFuzzer, that is the last one.
need clang clang libclang-rt-dev
exit 0
