#!/bin/sh
# Builds the explorer of a subject over a directory of its sources.
# usage: build.sh SUBJECT SOURCE_PARENT OUTPUT_DIRECTORY [FLAGS...]   (from the root of the checkout)
#
# SOURCE_PARENT/SUBJECT and SOURCE_PARENT/base have the sources, tests/model/SUBJECT its scripts. The sources that the
# subject's `hooked` names see hooks.h before anything else; locks are the model's; the model itself
# is plain C.
set -eu
subject=$1
parent=$2
into=$3
shift 3
cc=${CC:-cc}
model=tests/model/companion
flags="-std=c11 -D_GNU_SOURCE= -Wall -Wextra -Wconversion -Werror -g"
flags="$flags -I$parent -Ishmbus_ext -Itests/model -I$model -Itests/model/$subject $*"
mkdir -p "$into"
rm -f "$into"/*.o
small="-include tests/model/$subject/small_subject.h"
compile() { # SOURCE FLAGS...
    source=$1
    shift
    # shellcheck disable=SC2086 # several words
    $cc $flags $small "$@" -c "$source" -o "$into/$(basename "$source" .c).o"
}
hooked=$(sed -n 's/^ \* hooked: //p' "tests/model/$subject/subject.h")
plain=$(sed -n 's/^ \* plain: //p' "tests/model/$subject/subject.h")
for name in $hooked; do
    compile "$parent/$subject/$name.c" -include tests/model/hooks.h
done
for name in $plain; do
    compile "$parent/$subject/$name.c"
done
compile "tests/model/$subject/scripts.c" -include tests/model/hooks.h
for name in bell clock; do
    compile "$parent/base/$name.c" -include tests/model/hooks.h
done
for name in checksum shared_file; do
    compile "$parent/base/$name.c"
done
for name in engine memory explore; do
    compile "$model/$name.c"
done
$cc -o "$into/explore" "$into"/*.o -pthread
