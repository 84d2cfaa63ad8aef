"""The house rules that a machine can check: openings, layers, public names, leftovers."""

import importlib
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SKIPPED_DIRECTORIES = {"build", "dist", "node_modules", "__pycache__"}
HIDDEN_DIRECTORIES_KEPT = {".ci"}
TEXT_SUFFIXES = {
    ".c", ".cfg", ".h", ".html", ".in", ".json", ".md", ".py", ".pyi", ".sh", ".toml", ".txt",
}  # fmt: skip
TEXT_NAMES = {"Makefile", "run", ".editorconfig", ".gitignore"}

PACKAGES = ("shmbus", "shmbus_ext", "trainer_adapter")
SHMBUS_ALL = [
    "Annotator",
    "Bus",
    "BusBusyError",
    "BusClosedError",
    "BusExistsError",
    "BusFullError",
    "BusNotFoundError",
    "BusRemovedError",
    "BusStats",
    "CapacityError",
    "Columns",
    "Consumer",
    "DaemonUnavailableError",
    "DamagedError",
    "DeviceMismatchError",
    "Feeder",
    "Group",
    "LayoutMismatchError",
    "Ledger",
    "PeerGoneError",
    "Producer",
    "ProducerInfo",
    "ProducerRequests",
    "ProducerStats",
    "ProtocolError",
    "RecordTooLargeError",
    "RecorderUnavailableError",
    "Request",
    "RequestCounts",
    "Reservation",
    "Session",
    "ShmbusError",
    "StallError",
    "StallReport",
    "Trajectory",
    "UnannotatedGroup",
    "UnscoredError",
    "UnservedGroupError",
    "VersionUnknownError",
    "WaitTimeoutError",
    "__version__",
    "unlink",
]
TRAINER_ADAPTER_ALL = [
    "Batch",
    "ExtraField",
    "FieldNames",
    "LogprobMismatch",
    "OnlineDataHandler",
    "ScoredGroup",
    "group_advantages",
    "logprob_mismatch",
    "pack",
    "pad_input",
    "unpad_input",
    "varlen_attention",
]


def tree(directory: Path = ROOT) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if path.is_symlink():
            continue
        if path.is_file():
            yield path
        elif path.name in HIDDEN_DIRECTORIES_KEPT or not (
            path.name in SKIPPED_DIRECTORIES
            or path.name.startswith(".")
            or path.name.endswith(".egg-info")
        ):
            yield from tree(path)


def files(*suffixes: str) -> list[Path]:
    return [path for path in tree() if path.suffix in suffixes]


def texts() -> Iterator[tuple[str, str]]:
    for path in tree():
        if path.suffix in TEXT_SUFFIXES or path.name in TEXT_NAMES:
            yield relative(path), path.read_text()


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def report(offences: list[str]) -> None:
    assert not offences, "\n" + "\n".join(offences)


def opens_with_a_string(path: Path) -> bool:
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in (tokenize.ENCODING, tokenize.COMMENT, tokenize.NL):
                return token.type == tokenize.STRING and bool(token.string.strip("\"' \n"))
    return False


def test_every_file_opens_with_what_it_is_for() -> None:
    offences = []
    for path in files(".py", ".pyi"):
        if not opens_with_a_string(path):
            offences.append(f"{relative(path)}: no docstring at its top")
    for path in files(".c", ".h"):
        if not path.read_text().startswith(("/*", "//")):
            offences.append(f"{relative(path)}: no comment at its top")
    report(offences)


def test_only_the_python_binding_knows_python() -> None:
    offences = []
    for path in files(".c", ".h"):
        name = relative(path)
        included = re.findall(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)', path.read_text(), re.M)
        if "Python.h" in included and name != "shmbus_ext/python/binding.h":
            offences.append(f"{name}: includes Python.h, which only python/binding.h may")
        if name.startswith("shmbus_ext/python/"):
            continue
        if any(header.startswith("python/") for header in included):
            offences.append(
                f"{name}: includes a header of shmbus_ext/python, which only its files may"
            )
    report(offences)


def test_importing_shmbus_loads_no_torch() -> None:
    # In a fresh interpreter: this one loaded torch for earlier tests.
    code = "import shmbus, sys; print(sorted(m for m in sys.modules if m.startswith('torch')))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[]\n"


@pytest.mark.parametrize(
    ("package", "names"), [("shmbus", SHMBUS_ALL), ("trainer_adapter", TRAINER_ADAPTER_ALL)]
)
def test_the_public_names_are_these_and_sorted(package: str, names: list[str]) -> None:
    module = importlib.import_module(package)
    assert list(module.__all__) == names
    assert names == sorted(names)
    assert [name for name in names if not hasattr(module, name)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_says_that_it_is_typed(package: str) -> None:
    assert (ROOT / package / "__init__.py").is_file()
    assert (ROOT / package / "py.typed").is_file()


def test_no_two_files_of_the_suite_have_one_name() -> None:
    """Modules without a package: of two with the same name only one can be imported."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        found.setdefault(path.name, []).append(str(path.relative_to(ROOT)))
    report([", ".join(paths) for paths in found.values() if len(paths) > 1])


def test_each_finalizer_keeps_the_exception_of_a_signal_handler() -> None:
    bare = re.compile(r"^(?!.*finalizer).*\n +def __del__|\bweakref\.WeakSet\(", re.M)
    products = [path for path in files(".py") if not relative(path).startswith(("tests", "bench"))]
    report([relative(path) for path in products if bare.search(path.read_text())])


def report_lines(pattern: re.Pattern[str]) -> None:
    """Report each line of a text that has the pattern."""
    report(
        [
            f"{name}:{number}: {line.strip()}"
            for name, text in texts()
            for number, line in enumerate(text.splitlines(), start=1)
            if pattern.search(line)
        ]
    )


def test_nothing_is_left_to_do() -> None:
    # Joined here, to keep this file out of the report.
    marks = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]) + r")\b")
    report_lines(marks)


def test_no_file_names_a_directory_of_a_build_machine() -> None:
    directories = [r"/(?:home|root|Users)/\w"]
    # A checkout right below the root has too common a name to look for.
    directories += [
        re.escape(str(path)) + r"\b" for path in (ROOT, Path.home()) if len(path.parts) > 2
    ]
    machine_path = re.compile(r"(?<![\w.])(?:" + "|".join(directories) + ")")
    report_lines(machine_path)
