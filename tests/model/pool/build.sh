#!/bin/sh
# Builds the pool's explorer over a directory of pool sources.
# usage: build.sh POOL_PARENT OUTPUT_DIRECTORY [FLAGS...]   (from the root of the checkout)
#
# POOL_PARENT/pool has the sources. They see hooks.h before anything else, and a file of locks that
# is the model's; the model itself is plain C.
set -eu
parent=$1
into=$2
shift 2
cc=${CC:-cc}
model=tests/model/pool
flags="-std=c11 -D_GNU_SOURCE= -Wall -Wextra -Wconversion -Werror -g"
flags="$flags -I$parent -Ishmbus_ext -Itests/model -I$model $*"
mkdir -p "$into"
rm -f "$into"/*.o
small="-include $model/pool_small.h"
compile() { # SOURCE FLAGS...
    source=$1
    shift
    # shellcheck disable=SC2086 # several words
    $cc $flags $small "$@" -c "$source" -o "$into/$(basename "$source" .c).o"
}
for name in bell lease publish rows; do
    compile "$parent/pool/$name.c" -include tests/model/hooks.h
done
compile "$model/scripts.c" -include tests/model/hooks.h
compile "$parent/pool/pool.c"
compile shmbus_ext/ring/checksum.c
compile shmbus_ext/ring/clock.c
for name in engine memory explore; do
    compile "$model/$name.c"
done
$cc -o "$into/explore" "$into"/*.o -pthread
