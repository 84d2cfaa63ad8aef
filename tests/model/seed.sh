#!/bin/sh
# Plants one known bug into a copy of the ring and its base, builds the explorer over it, and requires that it
# finds a violation. Exit status 0: it was found.
# usage: seed.sh SEED.sed   (from the root of the checkout; CC names the compiler)
set -eu
seed=$1
name=$(basename "$seed" .sed)
into=build/explore/seeds/$name
options=$(sed -n 's/^# options: //p' "$seed")

rm -rf "$into"
mkdir -p "$into"
cp -R shmbus_ext/ring shmbus_ext/base "$into"
for file in "$into"/ring/*.c "$into"/base/*.c; do
    sed -f "$seed" "$file" > "$file.new"
    cmp -s "$file" "$file.new" || planted=yes
    mv "$file.new" "$file"
done
[ "${planted:-no}" = yes ] || {
    echo "seed '$name' changes nothing: the code it was written for has changed" >&2
    exit 1
}
sh tests/model/build.sh "$into/ring" "$into" -O1
# shellcheck disable=SC2086 # several words
if "$into/explore" $options --states 20000000 --expect-violation > "$into/log" 2>&1; then
    echo "seed '$name': found ($(grep -m 1 -o 'violation in.*' "$into/log" | cut -c 1-110))"
else
    cat "$into/log" >&2
    echo "seed '$name': NOT found" >&2
    exit 1
fi
