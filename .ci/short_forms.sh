#!/usr/bin/env bash
# Short forms of the long runs that neither the test suite nor `make check` has: sanitizers,
# valgrind, another processor, fuzzing for new cases. `.ci/run` calls it. A run whose tool is missing
# is skipped, with its name and the package to install; no other run is skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Tests that read and write segments from Python; `make sanitize` runs the whole suite.
SANITIZED_TESTS='tests/ring/test_bus.py tests/stash/test_consumer.py tests/stash/test_group.py
    tests/stash/test_group_table.py tests/stash/test_retries.py tests/client/test_borrower.py'

has() { # COMMANDS...
    for command in "$@"; do
        command -v "$command" > /dev/null || return 1
    done
}
sanitizes() { # KIND: whether this compiler can build with it
    echo 'int main(void) { return 0; }' |
        ${CC:-cc} "-fsanitize=$1" -x c -o /dev/null - 2> /dev/null
}
fuzzes() { # whether clang and its libFuzzer are installed
    echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' |
        clang -fsanitize=fuzzer,address,undefined -x c -o /dev/null - 2> /dev/null
}
crosses() { # whether there is a compiler for aarch64 with its C library, and qemu
    has aarch64-linux-gnu-gcc qemu-aarch64 && echo '#include <stdio.h>' |
        aarch64-linux-gnu-gcc -fsyntax-only -x c - 2> /dev/null
}
targets=()
short() { # WHAT TARGET HINT CONDITION...: runs the target with the others if the condition holds
    local what=$1 target=$2 hint=$3
    shift 3
    if "$@"; then
        targets+=("$target")
    else
        printf '\n--- %s: SKIPPED, %s\n' "$what" "$hint"
    fi
}

short 'C tests under ASan and UBSan' run-c-asan 'the compiler lacks it (apt install gcc)' \
    sanitizes address,undefined
short 'C tests under TSan' run-c-tsan 'the compiler lacks it (apt install gcc)' \
    sanitizes thread
short 'Python tests under ASan and UBSan' sanitize-python \
    'the compiler lacks it (apt install gcc)' sanitizes address,undefined
short 'C tests under valgrind' valgrind 'there is no valgrind (apt install valgrind)' \
    has valgrind
short 'C tests for aarch64' cross \
    'no cross-compiler or qemu (apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)' \
    crosses
short 'fuzzing in C' fuzz-c \
    'there is no clang with libFuzzer (apt install clang libclang-rt-dev)' fuzzes

printf '\n--- side by side: %s\n' "${targets[*]}"
make --jobs="$(nproc)" --output-sync=target SIDE_BY_SIDE=1 FUZZ_SECONDS=4 \
    "ARGS=$(echo $SANITIZED_TESTS)" "${targets[@]}"

# By plain mutations: atheris takes longer to start than this takes in all.
for target in decoders control snapshot; do
    printf '\n--- fuzzing of %s (at %s s)\n' "$target" "$SECONDS"
    .venv/bin/python "tests/fuzz/fuzz_$target.py" \
        --random 4 "$RANDOM" "tests/fuzz/corpus/$target/"*
done
