"""trainer_adapter's imports: no circle, no private name of shmbus, and nothing before its use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import shmbus

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "trainer_adapter").rglob("*.py"))
}


def imported(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever in it, for type checkers too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_no_import_goes_in_a_circle_not_even_a_late_one() -> None:
    below = {name: imported(path) & SOURCES.keys() for name, path in SOURCES.items()}
    for name in below:
        seen: set[str] = set()
        left = [name]
        while left:
            found = below[left.pop()] - seen
            seen |= found
            left += found
        assert name not in seen - {"trainer_adapter"}, f"{name} imports itself by {sorted(seen)}"


def test_only_public_names_of_shmbus_are_used() -> None:
    offences = []
    for name, path in SOURCES.items():
        offences += [
            f"{name} imports {module}"
            for module in imported(path)
            if module.startswith("shmbus.")
            and not module.startswith("shmbus.batch")
            and module.removeprefix("shmbus.") not in shmbus.__all__
        ]
        offences += [
            f"{name} uses shmbus.{node.attr}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "shmbus"
            and node.attr not in shmbus.__all__
        ]
    assert not offences


def test_importing_the_package_loads_neither_torch_nor_numpy_nor_the_bus() -> None:
    code = "import sys, trainer_adapter; print({'numpy', 'shmbus', 'torch'} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.returncode) == ("set()\n", 0), result.stderr
