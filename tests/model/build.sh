#!/bin/sh
# Builds the explorer over a directory of ring sources.
# usage: build.sh RING_DIRECTORY OUTPUT_DIRECTORY [FLAGS...]   (from the root of the checkout)
#
# The ring's files see hooks.h before anything else; segment.c, which does nothing between
# processes but to lock, gets its locks from the model; the model itself is plain C.
set -eu
ring=$1
into=$2
shift 2
cc=${CC:-cc}
flags="-std=c11 -D_GNU_SOURCE= -Wall -Wextra -Wconversion -Werror -g -I$ring/.. -Itests/model $*"
mkdir -p "$into"
rm -f "$into"/*.o
small="-include tests/model/small.h"
compile() { # SOURCE FLAGS...
    source=$1
    shift
    # shellcheck disable=SC2086 # several words
    $cc $flags "$@" -c "$source" -o "$into/$(basename "$source" .c).o"
}
for name in attach doorbell extents reader reclaim record retry_table writer; do
    compile "$ring/$name.c" -include tests/model/hooks.h
done
# shellcheck disable=SC2086
compile "$ring/segment.c" $small -Dsegment_lock=kernel_lock -Dsegment_unlock=kernel_unlock
compile "$ring/checksum.c"
for name in engine memory ghost ghost_wanted actors asking explore; do
    # shellcheck disable=SC2086
    compile "tests/model/$name.c" $small
done
$cc -o "$into/explore" "$into"/*.o -pthread
