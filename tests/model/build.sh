#!/bin/sh
# Builds the explorer over a directory of ring sources.
# usage: build.sh RING_DIRECTORY OUTPUT_DIRECTORY [FLAGS...]   (from the root of the checkout)
#
# The ring's files see hooks.h before anything else; segment.c, which does nothing between
# processes but to lock, keeps the kernel's locks, and all others have the model's; the model itself
# is plain C.
set -eu
ring=$1
base=$1/../base
into=$2
shift 2
cc=${CC:-cc}
flags="-std=c11 -D_GNU_SOURCE= -Wall -Wextra -Wconversion -Werror -g -I$ring/.. -Itests/model -DSHMBUS_DECLARED_BYTES=56u -DSHMBUS_RELAY_MIN_ENTRIES=1u $*"
mkdir -p "$into"
rm -f "$into"/*.o
small="-include tests/model/small.h"
compile() { # SOURCE FLAGS...
    source=$1
    shift
    # shellcheck disable=SC2086 # several words
    $cc $flags "$@" -c "$source" -o "$into/$(basename "$source" .c).o"
}
for name in attach count doorbell extents intent_log lead moved_set reader reclaim record \
    relay_journal \
    recovery request_feed request_row requests retry_table writer; do
    compile "$ring/$name.c" -include tests/model/hooks.h
done
for name in bell clock; do
    compile "$base/$name.c" -include tests/model/hooks.h
done
kernel="-Dfile_lock_take=kernel_take -Dfile_lock_drop=kernel_drop"
# shellcheck disable=SC2086
compile "$ring/segment.c" $small $kernel
# shellcheck disable=SC2086
compile "$base/file_lock.c" $kernel
# shellcheck disable=SC2086
compile "$ring/splits.c" $small
# Notes that nothing is decided by: no place to switch actors at.
# shellcheck disable=SC2086
compile "$ring/observe.c" $small
for name in checksum shared_file; do
    # shellcheck disable=SC2086
    compile "$base/$name.c" $small
done
# shellcheck disable=SC2086
compile "$ring/request_parts.c" $small
# shellcheck disable=SC2086
compile "$ring/declared_schema.c" $small
for name in engine memory ghost ghost_retry actors admission prompts retries explore; do
    # shellcheck disable=SC2086
    compile "tests/model/$name.c" $small
done
$cc -o "$into/explore" "$into"/*.o -pthread
