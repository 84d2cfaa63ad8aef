#!/bin/sh
# Builds the explorer of a subject over a directory of its sources.
# usage: build.sh SUBJECT SOURCE_PARENT OUTPUT_DIRECTORY [FLAGS...]   (from the root of the checkout)
#
# SOURCE_PARENT/SUBJECT and SOURCE_PARENT/base have the sources. Those that the subject's subject.h
# calls hooked see hooks.h before anything else; locks are the model's, but for the kernel's in the
# sources that need these; the model itself is plain C.
set -eu
subject=$1
parent=$2
into=$3
shift 3
cc=${CC:-cc}
model=tests/model
flags="-std=c11 -D_GNU_SOURCE= -Wall -Wextra -Wconversion -Werror -g"
flags="$flags -I$parent -Ishmbus_ext -I$model -I$model/$subject -include $model/$subject/small.h $*"
mkdir -p "$into"
rm -f "$into"/*.o
compile() { # SOURCE FLAGS...
    source=$1
    shift
    # shellcheck disable=SC2086 # several words
    $cc $flags "$@" -c "$source" -o "$into/$(basename "$source" .c).o"
}
listed() {
    sed -n "s/^ \* $1: //p" "$model/$subject/subject.h"
}
for name in $(listed hooked); do
    compile "$parent/$subject/$name.c" -include $model/hooks.h
done
for name in $(listed plain); do
    compile "$parent/$subject/$name.c"
done
kernel=$(printf -- '-Dfile_lock_%s=kernel_%s ' take take drop drop share share probe probe find find)
for name in $(listed kernel); do
    # shellcheck disable=SC2086
    compile "$parent/$subject/$name.c" $kernel
    # shellcheck disable=SC2086
    compile "$parent/base/file_lock.c" $kernel
done
for name in bell clock; do
    compile "$parent/base/$name.c" -include $model/hooks.h
done
for name in checksum shared_file threads; do
    compile "$parent/base/$name.c"
done
for name in "$model/$subject"/*.c; do
    # shellcheck disable=SC2046
    compile "$name" $(listed scripts)
done
for name in engine memory explore; do
    compile "$model/$name.c"
done
$cc -o "$into/explore" "$into"/*.o -pthread
