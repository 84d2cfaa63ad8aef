#!/usr/bin/env bash
# Installs what some checks need beside a compiler and pip: on Debian and Ubuntu, as root. Nowhere
# else, and where it fails, nothing is lost but those checks: they are skipped by name. Starts no
# service.
set -uo pipefail

export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
lists= # whether the lists of packages are fresh
# For all of it; on a usual line it takes one.
MINUTES=4

in_time() { # COMMAND...
    local left=$((MINUTES * 60 - SECONDS))
    [ "$left" -gt 0 ] && timeout "$left" "$@" > /dev/null
}

install() { # PACKAGES...: those of them that this system knows; their names differ a little
    local known=() package
    [ "$(id -u)" -eq 0 ] && command -v apt-get > /dev/null || return 1
    [ -n "$lists" ] || in_time apt-get -qq update || return 1
    lists=fresh
    for package in "$@"; do
        apt-cache policy "$package" | grep -q 'Candidate: [^(]' && known+=("$package")
    done
    in_time apt-get -qq install -y --no-install-recommends "${known[@]}"
}

need() { # COMMAND PACKAGES...
    local tool=$1
    shift
    command -v "$tool" > /dev/null || install "$@" ||
        echo "without $tool ($*): the checks that need it are skipped" >&2
}

need valgrind valgrind
need redis-server redis-server
need qemu-aarch64 qemu-user
need aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu libc6-dev-arm64-cross
# Where libFuzzer is a package of its own, it comes with the last of these.
need clang clang libclang-rt-dev
exit 0
