#!/bin/sh
# Names all missing system requirements together, with a hint for each.
# Usage: requirements.sh [PYTHON]. Exit status 0 if nothing is missing, 1 otherwise.
set -u

python=${1:-python3}
# The largest bus of the tests and the demo, with room for the buses of tests that run beside it.
shm_needed_mib=512
missing=0

lacks() {
    printf 'missing: %s\n    %s\n' "$1" "$2" >&2
    missing=1
}

[ "$(uname -s)" = Linux ] ||
    lacks "Linux (this is $(uname -s))" "The bus sleeps on futexes; use a Linux machine or container."

cc=${CC:-}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    found=$("$python" --version 2>/dev/null || echo 'nothing that runs')
    lacks "Python 3.10 or newer (PYTHON is '$python', which is $found)" \
        "Install it, or name one: make PYTHON=python3.11 ..."
else
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        lacks "the venv module of '$python'" "On Debian and Ubuntu: apt install python3-venv"
    header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
    [ -f "$header" ] ||
        lacks "the C headers of '$python' ($header)" \
            "On Debian and Ubuntu: apt install python3-dev; on Fedora: dnf install python3-devel"
    # The compiler that setuptools uses if CC is not set.
    [ -n "$cc" ] || cc=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("CC") or "cc")')
fi

# $cc stays unquoted, since it may carry flags ("gcc -pthread").
printf '#include <stdatomic.h>\n#include <sys/mman.h>\nint main(void) { return 0; }\n' |
    ${cc:-cc} -std=c11 -x c -o /dev/null - 2>/dev/null ||
    lacks "a C11 compiler with its C library's headers (tried '${cc:-cc}')" \
        "On Debian and Ubuntu: apt install build-essential; or name one: CC=clang make ..."

if [ -d /dev/shm ] && [ -w /dev/shm ]; then
    free_mib=$(df -Pm /dev/shm | awk 'NR == 2 { print $4 }')
    [ "$free_mib" -ge "$shm_needed_mib" ] ||
        lacks "$shm_needed_mib MiB of free shared memory (/dev/shm has $free_mib MiB)" \
            "In a container: docker run --shm-size=1g; else: mount -o remount,size=1g /dev/shm"
else
    lacks "a /dev/shm that can be written" "Mount it: mount -t tmpfs -o size=1g tmpfs /dev/shm"
fi

exit $missing
