#!/bin/sh
# Plants one known bug into a copy of a subject and of base, builds the explorer over the copy, and
# requires a violation. Exit status 0: found.
# usage: seed.sh tests/model/SUBJECT/seeds/SEED.sed   (from the root of the checkout; CC names the compiler)
set -eu
seed=$1
subject=$(basename "$(dirname "$(dirname "$seed")")")
name=$(basename "$seed" .sed)
into=build/explore/$subject-seeds/$name
options=$(sed -n 's/^# options: //p' "$seed")

rm -rf "$into"
mkdir -p "$into"
cp -R "shmbus_ext/$subject" shmbus_ext/base "$into"
for file in "$into/$subject"/*.c "$into"/base/*.c; do
    sed -f "$seed" "$file" > "$file.new"
    cmp -s "$file" "$file.new" || planted=yes
    mv "$file.new" "$file"
done
[ "${planted:-no}" = yes ] || {
    echo "seed '$name' changes nothing: the code it was written for has changed" >&2
    exit 1
}
options="--states 20000000 $options"
sh tests/model/build.sh "$subject" "$into" "$into" -O1 -Wno-unused
# shellcheck disable=SC2086 # several words
if "$into/explore" $options --expect-violation > "$into/log" 2>&1; then
    echo "seed '$name': found ($(grep -m 1 -o 'violation in.*' "$into/log" | cut -c 1-110))"
else
    cat "$into/log" >&2
    echo "seed '$name': NOT found" >&2
    exit 1
fi
