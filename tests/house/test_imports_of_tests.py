"""Peers' tests and examples import what exists: names of the product, and modules of tests."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from test_style import ROOT, tree

OURS = ("shmbus", "trainer_adapter", "bench")
#: No module of these names is anywhere, but for `requests`, a package.
FOLDERS = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()} - {
    *sys.stdlib_module_names, *OURS, "requests",
}  # fmt: skip


def file_of(module: str, *places: Path) -> Path | None:
    paths = [place.joinpath(*module.split(".")) for place in places or (ROOT,)]
    found = [
        each
        for path in paths
        for each in (path.with_suffix(".py"), path / "__init__.py", path.with_suffix(".pyi"))
    ]
    return next((each for each in found if each.exists()), None)


@cache
def names_of(path: Path) -> set[str]:
    """Return the names in a module's text; a module with ``__getattr__`` has strings for them."""
    found = {each.stem for each in path.parent.iterdir()} if path.stem == "__init__" else set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.alias():
                found.add(node.asname or node.name)
            case ast.Constant(value=str()):
                found.add(node.value)
    return found


def missing(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            for name in (alias.name for alias in node.names):
                if name.split(".")[0] in FOLDERS:
                    yield f"{where}: {name} is a folder of tests"
                elif name.split(".")[0] in OURS and not file_of(name):
                    yield f"{where}: no {name}"
        elif isinstance(node, ast.ImportFrom) and node.module:
            ours = node.module.split(".")[0] in OURS
            module = file_of(node.module, *(() if ours else (path.parent, ROOT / "tests")))
            if module is None and ours:
                yield f"{where}: no {node.module}"
            elif module is not None:
                have = names_of(module)
                yield from (
                    f"{where}: no {alias.name} in {node.module}"
                    for alias in node.names
                    if alias.name not in have
                )


def test_every_import_of_a_test_or_example_exists() -> None:
    files = [path for path in tree() if path.suffix == ".py"]
    found = [
        each
        for path in files
        if path.is_relative_to(ROOT / "tests" / "peers") or path.is_relative_to(ROOT / "examples")
        for each in missing(path)
    ]
    assert not found, found
