"""What somebody meets who runs Python in the source tree; what the suite takes for a package."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import _has

from shmbus_ext import _core

ROOT = Path(__file__).parents[2]


def copy_source(package: str, folder: Path) -> None:
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / package, folder / package, ignore=ignored)


def refused_import(package: str, folder: Path) -> str:
    """The last line of an import that fails, of a package in this folder."""
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import {package}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, timeout=60
    )
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_an_import_of_the_bare_source_says_where_it_is_and_what_to_do(tmp_path: Path) -> None:
    for package in ("shmbus", "shmbus_ext"):
        copy_source(package, tmp_path)
    said = refused_import("shmbus", tmp_path)
    assert said.startswith("ImportError: shmbus_ext: expected a compiled _core for this Python in")
    assert str(tmp_path / "shmbus_ext") in said
    assert "another directory" in said and "build_ext --inplace" in said


def test_a_wheel_of_another_c_library_is_a_sentence(tmp_path: Path) -> None:
    copy_source("shmbus_ext", tmp_path)
    own = Path(_core.__file__)
    content = own.read_bytes()
    assert b"\0libc.so.6\0" in content
    # As with musl in glibc's place: the core's linked library is missing.
    foreign = content.replace(b"\0libc.so.6\0", b"\0libz.so.0\0")
    (tmp_path / "shmbus_ext" / own.name).write_bytes(foreign)
    said = refused_import("shmbus_ext", tmp_path)
    assert said.startswith("ImportError: shmbus_ext: expected a _core for this system's C library")
    assert "libz.so.0" in said and "pip install --no-binary=shmbus shmbus" in said


def test_a_folder_passes_for_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_stack_of_its_own").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert _has("pytest") and not _has("pytest", "a_stack_of_its_own")
    (tmp_path / "a_stack_of_its_own" / "__init__.py").touch()
    assert _has("a_stack_of_its_own")
