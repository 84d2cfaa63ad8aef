"""``shmbus doctor``: checks this machine for the needs of a bus, with a hint for each problem.

Invariants:

- A check changes nothing; a trial leaves nothing behind.
- torch is imported in a child process only, which ends at a time limit.
- "fail" means that shmbus cannot work; "warn" that shmbus works below its best.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import importlib.metadata
import json
import os
import platform
import pwd
import re
import resource
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

import shmbus
from shmbus.base.format import printable, several, show_size
from shmbus.cli._options import Commands, add_command, print_json
from shmbus.inspect import leftovers
from shmbus.segment.room import limits
from shmbus_ext import _core

#: Finding on a missing package.
NOT_INSTALLED: Final = "not installed"

_ROOT: Final = Path("/")
_SHM: Final = Path("/dev/shm")
#: Lowest number of a regular user for logind: system users keep their shared memory.
_FIRST_USER: Final = 1000

#: Free bytes of /dev/shm below which no useful bus fits: its tables and a few records.
_SHM_FAIL_BYTES: Final = 8 << 20
#: Free bytes below which two buses of the default size don't fit; Docker gives 64 MiB.
_SHM_WARN_BYTES: Final = 512 << 20
#: Open files per process below which a daemon with a few hundred clients runs out of them.
_FILES: Final = 1024
#: Seconds that importing torch may take: tens from a cold disk, for ever with a hanging driver.
_TORCH_S: Final = 120.0


class Finding(msgspec.Struct, frozen=True):
    """The result of one check."""

    #: Its name; stays the same over versions.
    check: str
    #: Grade of shmbus on this machine: well, below its best, or not at all.
    level: Literal["ok", "warn", "fail"]
    found: str
    #: The remedy, or "". An "ok" may carry a hint too, for a further improvement.
    hint: str = ""


#: The documentation of each check, as a path in the repository.
_CHECKS_OF_PAGE: Final = {
    "docs/compat.md#torch": "torch",
    "docs/errors.md#by-symptom": "round_trip",
    "docs/faq.md#how-much-devshm": "memory shm",
    "docs/faq.md#which-platforms-which-status": "file_locks kernel python",
    "docs/first-hour.md#install": "msgspec numpy packages prometheus_client "
    "safetensors shmbus uvloop",
    "docs/operating.md#cleaning-up": "foreign_files leftovers",
    "docs/operating.md#size-and-life-of-a-bus": "file_size limits",
    "docs/operating.md#when-you-log-out": "logout",
    "docs/trainer.md#to-a-gpu": "locked_memory",
    "docs/tuning.md#the-machine": "cpu huge_pages open_files",
}
PAGES: Final = {check: page for page, checks in _CHECKS_OF_PAGE.items() for check in checks.split()}


def diagnose(*, torch: bool = True) -> Iterator[Finding]:
    """Run all checks, each as the caller asks for the next."""
    for check in _CHECKS:
        name = check.__name__.removeprefix("_check_")
        try:
            yield from check()
        except (OSError, ValueError, shmbus.ShmbusError) as error:
            # A failed check must not hide the remaining checks.
            yield Finding(name, "warn", f"cannot tell: {error}")
    yield _check_torch(torch)


def _read(path: str | Path) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


# -- the machine ------------------------------------------------------------------------------


def _mount_type(path: Path) -> str | None:
    found = None
    for line in (_read("/proc/self/mounts") or "").splitlines():
        parts = line.split()
        if len(parts) > 2 and parts[1] == str(path):
            found = parts[2]  # the last mount there counts
    return found


def _check_shm() -> Iterator[Finding]:
    kind = _mount_type(_SHM)
    if not _SHM.is_dir():
        yield Finding("shm", "fail", "there is no /dev/shm", "mount -t tmpfs tmpfs /dev/shm")
        return
    if not os.access(_SHM, os.R_OK | os.W_OK | os.X_OK):
        hint = "chmod 1777 /dev/shm, or run as a user who may write there"
        yield Finding("shm", "fail", f"/dev/shm is not writable for uid {os.geteuid()}", hint)
        return
    room = os.statvfs(_SHM)
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    found = f"{kind or 'a plain directory'}, {show_size(free)} free of {show_size(total)}"
    larger = "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm"
    if kind not in ("tmpfs", "ramfs"):
        hint = "mount a tmpfs there: a bus on a disk is slow, and its pages are written out"
        yield Finding("shm", "warn", found, hint)
    elif free < _SHM_FAIL_BYTES:
        yield Finding("shm", "fail", found, f"enlarge it ({larger}), or see `shmbus gc`")
    elif free < _SHM_WARN_BYTES:
        hint = f"little for long trajectories; enlarge it ({larger}), or see `shmbus gc`"
        yield Finding("shm", "warn", found, hint)
    else:
        yield Finding("shm", "ok", found)


def _check_memory() -> Iterator[Finding]:
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = f"{show_size(pages)} of memory unused"
    shm, *others = limits(_ROOT)
    least = min(others, key=lambda limit: limit.left, default=shm)
    if others:
        found += f"; {least}"
    if least.left < shm.left:
        hint = (
            "shared memory counts against that limit, which is tighter than /dev/shm: larger buses "
            f"are refused; raise the limit ({least.remedy})"
        )
        yield Finding("memory", "warn", found, hint)
    else:
        yield Finding("memory", "ok", found)


def _check_limits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    level: Literal["ok", "warn"] = "ok" if files >= _FILES else "warn"
    yield Finding(
        "open_files",
        level,
        f"{files} files a process",
        "" if level == "ok" else "ulimit -n 65536: a daemon needs two for each client",
    )
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if size != resource.RLIM_INFINITY:
        hint = "ulimit -f unlimited: a bus is a file, and larger ones cannot be created"
        yield Finding("file_size", "warn", f"files end at {show_size(size)}", hint)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked == resource.RLIM_INFINITY:
        yield Finding("locked_memory", "ok", "unlimited")
    else:
        hint = "only a GPU that reads the ring needs more: ulimit -l unlimited"
        yield Finding("locked_memory", "ok", f"{show_size(locked)} a process", hint)


def _check_logout() -> Iterator[Finding]:
    """Whether the machine keeps a user's segments and daemon when the last session ends."""
    user = pwd.getpwuid(os.geteuid())
    if not (_ROOT / "run/systemd/system").is_dir():
        yield Finding("logout", "ok", "no systemd here: nothing ends at a logout")
        return
    if user.pw_uid < _FIRST_USER:
        yield Finding("logout", "ok", f"{user.pw_name} is a system user: nothing ends at a logout")
        return
    if (_ROOT / "var/lib/systemd/linger" / user.pw_name).exists():
        yield Finding("logout", "ok", f"{user.pw_name} lingers: nothing ends at a logout")
        return
    linger = f"loginctl enable-linger {user.pw_name}"
    if _removes_ipc():
        yield Finding(
            "logout",
            "warn",
            f"logind removes what {user.pw_name} has in /dev/shm when the last session ends "
            "(RemoveIPC=yes), also under a living run of cron or a scheduler; user units end then",
            f"{linger}; or RemoveIPC=no below [Login] in /etc/systemd/logind.conf.d/shmbus.conf "
            "and systemctl restart systemd-logind, which keeps segments and not user units",
        )
    else:
        found = "/dev/shm is kept at a logout (RemoveIPC=no); user units end with the last session"
        yield Finding("logout", "ok", found, f"for a daemon in a user unit: {linger}")


def _removes_ipc() -> bool:
    """Tell if logind's settings remove a user's shared memory; by default they remove it."""
    folders = [_ROOT / part / "systemd" for part in ("etc", "run", "usr/local/lib", "usr/lib")]
    mains = (folder / "logind.conf" for folder in folders)
    # Among files of the same name the first folder's counts; all are read in order of their names.
    more = {
        file.name: file
        for folder in reversed(folders)
        for file in sorted((folder / "logind.conf.d").glob("*.conf"))
    }
    parser = configparser.ConfigParser(
        strict=False, interpolation=None, delimiters="=", allow_no_value=True
    )
    removes = True
    for file in [*filter(Path.is_file, mains)][:1] + [more[name] for name in sorted(more)]:
        parser.clear()
        with contextlib.suppress(configparser.Error, OSError, UnicodeDecodeError):
            parser.read_string(file.read_text())
            value = (parser.get("Login", "RemoveIPC", fallback=None) or "").strip().lower()
            removes = removes if not value else value in ("1", "yes", "y", "true", "t", "on")
    return removes


def _check_huge_pages() -> Iterator[Finding]:
    """Check a bus for huge pages by a trial, since many settings decide."""
    name = f"doctor-pages-{os.getpid()}"
    try:
        with shmbus.Bus.create(name, "8MiB"):
            maps = _read("/proc/self/smaps") or ""
    except (shmbus.ShmbusError, OSError):
        return  # the round trip says why
    _, _, ours = maps.partition(f"shmbus.{name}")
    found = re.search(r"^ShmemPmdMapped: +(\d+) kB$", ours, re.MULTILINE)
    if found and int(found[1]) > 0:
        yield Finding("huge_pages", "ok", "a bus lies in huge pages")
        return
    hint = (
        "a bus in huge pages is up to a quarter faster: Linux 6.1 and newer gives them unless "
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled is deny; an older one where "
        "/dev/shm is mounted with huge=within_size"
    )
    yield Finding("huge_pages", "ok", "a bus lies in small pages", hint)


def _check_kernel() -> Iterator[Finding]:
    release = os.uname().release
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < (3, 15):
        hint = "locks that prove a process dead came with Linux 3.15"
        yield Finding("kernel", "fail", f"Linux {release}", hint)
    elif version < (5, 14):
        hint = "creating a large bus is faster from Linux 5.14 on (MADV_POPULATE_WRITE)"
        yield Finding("kernel", "ok", f"Linux {release}", hint)
    else:
        yield Finding("kernel", "ok", f"Linux {release}")


def _check_file_locks() -> Iterator[Finding]:
    """Check the kernel for open-file-description locks, needed by every proof of death."""
    with tempfile.TemporaryFile(dir=_SHM, prefix="shmbus-doctor-") as file:
        holder = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_CLOEXEC)
        try:
            works = _core.lock_all(holder) and _core.lock_held(file.fileno(), 0, 0)
        finally:
            os.close(holder)
        works = works and not _core.lock_held(file.fileno(), 0, 0)
    if works:
        yield Finding("file_locks", "ok", "locks on /dev/shm end with their owner")
    else:
        hint = "this sandbox (gVisor?) has no open-file-description locks; run on plain Linux"
        yield Finding("file_locks", "fail", "locks on /dev/shm do not end with their owner", hint)


def _check_cpu() -> Iterator[Finding]:
    machine = platform.machine()
    info = _read("/proc/cpuinfo") or ""
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.M)
    cores = len(os.sched_getaffinity(0))
    found = f"{cores} cores, {machine}" + (f", {model[1]}" if model else "")
    flags = set(re.findall(r"\w+", info))
    fast_crc = bool(flags & {"sse4_2", "crc32"})
    if sys.byteorder != "little":
        hint = "the segment is little-endian; there is no port to this machine"
        yield Finding("cpu", "fail", found, hint)
    elif cores < 2:
        hint = "producers and the trainer take turns on one core; allow more (taskset, --cpus)"
        yield Finding("cpu", "warn", found, hint)
    else:
        hint = "" if fast_crc else "no CRC instruction: checksums are computed in software"
        yield Finding("cpu", "ok", found, hint)


# -- the software -----------------------------------------------------------------------------


def _check_python() -> Iterator[Finding]:
    found = f"{platform.python_implementation()} {platform.python_version()}"
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    if not gil:
        hint = "the core relies on the interpreter lock; use the build of Python that has it"
        yield Finding("python", "fail", f"{found}, free-threaded", hint)
    else:
        yield Finding("python", "ok", found)


def _check_shmbus() -> Iterator[Finding]:
    layout = f"layout {_core.LAYOUT_VERSION} ({_core.LAYOUT_HASH & 0xFFFFFFFF:#010x})"
    yield Finding("shmbus", "ok", f"shmbus {shmbus.__version__}, {layout}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_packages() -> Iterator[Finding]:
    for package in ("numpy", "msgspec", "uvloop"):
        version = _version(package)
        if version is None:
            yield Finding(package, "fail", NOT_INSTALLED, f"pip install {package}")
        else:
            yield Finding(package, "ok", version)
    for package, extra in _OPTIONAL:
        version = _version(package)
        hint = "" if version else f"pip install 'shmbus[{extra}]', if you want it"
        yield Finding(package, "ok", version or NOT_INSTALLED, hint)


_OPTIONAL: Final = (
    ("prometheus_client", "metrics"),
    ("safetensors", "snapshot"),
)


def _check_round_trip() -> Iterator[Finding]:
    """Send a trajectory through a bus here; the bus is removed afterwards."""
    name = f"doctor-{os.getpid()}"
    try:
        with shmbus.Bus.create(name, "1MiB"), shmbus.Producer(name) as producer:
            producer.put("doctor", group_size=1, index=0, timeout=5)
            with shmbus.Consumer(name) as consumer:
                for group in consumer.take(timeout=5):
                    group.ack()
                acknowledged = consumer.stats().acknowledged
    except (shmbus.ShmbusError, OSError) as error:
        yield Finding("round_trip", "fail", str(error), "see the findings above")
        return
    if acknowledged == 1:
        yield Finding("round_trip", "ok", "a trajectory went through a bus of 1 MiB")
    else:
        hint = "this installation is broken: pip install --force-reinstall shmbus"
        yield Finding("round_trip", "fail", "a trajectory did not come back", hint)


def _check_leftovers() -> Iterator[Finding]:
    dead = [leftover for leftover in leftovers.survey() if leftover.verdict == "removable"]
    if dead:
        size = show_size(sum(leftover.size for leftover in dead))
        yield Finding(
            "leftovers",
            "warn",
            f"{len(dead)} abandoned files hold {size} of /dev/shm",
            "`shmbus gc` shows them, `shmbus gc --yes` removes them",
        )
    else:
        yield Finding("leftovers", "ok", "nothing abandoned in /dev/shm")
    if foreign := leftovers.foreign():
        size = show_size(sum(each.size for each in foreign))
        yield Finding(
            "foreign_files",
            "warn",
            f"{len(foreign)} files of other programs hold {size} of /dev/shm, and no process here "
            f"maps them: {printable(foreign[0].path)}"
            + (f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""),
            "`shmbus gc` lists the commands that remove them",
        )


_CHECKS: Final[tuple[Callable[[], Iterator[Finding]], ...]] = (
    _check_shm,
    _check_memory,
    _check_limits,
    _check_logout,
    _check_huge_pages,
    _check_kernel,
    _check_file_locks,
    _check_cpu,
    _check_python,
    _check_shmbus,
    _check_packages,
    _check_round_trip,
    _check_leftovers,
)

# Runs in a child: torch takes seconds and hundreds of megabytes, and may crash on a bad driver.
_ASK_TORCH: Final = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "built_for": torch.version.cuda or torch.version.hip or "",
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
}))
"""  # noqa: E501


def _check_torch(ask: bool) -> Finding:
    version = _version("torch")
    if version is None:
        hint = "the bus needs none; a trainer does: pip install 'shmbus[train]'"
        return Finding("torch", "ok", NOT_INSTALLED, hint)
    if not ask:
        return Finding("torch", "ok", version)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=_TORCH_S
        )
    except subprocess.TimeoutExpired:
        hint = "a driver that hangs? try: python -c 'import torch'; --quick leaves this out"
        found = f"{version}, not imported within {_TORCH_S:.0f} s"
        return Finding("torch", "warn", found, hint)
    answer = None
    with contextlib.suppress(json.JSONDecodeError, IndexError):
        answer = json.loads(done.stdout.splitlines()[-1])
    if answer is None:
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        hint = "the bus works without; reinstall torch for the trainer side"
        return Finding("torch", "warn", f"{version} cannot be imported: {why[:200]}", hint)
    if answer["devices"]:
        names = ", ".join(sorted(set(answer["devices"])))
        found = f"{version}, CUDA {answer['built_for']}, {len(answer['devices'])} x {names}"
        return Finding("torch", "ok", found)
    if answer["built_for"]:
        hint = "see nvidia-smi; in a container: docker run --gpus all"
        return Finding("torch", "warn", f"{version}, built for a GPU and finds none", hint)
    return Finding("torch", "ok", f"{version}, CPU only")


_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
_NAME_WIDTH = 19
_HINT_WIDTH = 76


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = add_command(
        commands,
        "doctor",
        run,
        help="check this machine's readiness for a bus",
        description="Checks shared memory, limits, kernel, processor, Python and packages, and "
        "puts one trajectory through a bus of its own. A finding that can be improved comes with a "
        "hint. Exit status 1 where a check fails.",
        examples=[
            "shmbus doctor",
            "shmbus doctor --quick   # without importing torch",
            "shmbus doctor --json | jq '.[] | select(.level != \"ok\")'",
        ],
        json=True,
        bus=False,
    )
    parser.add_argument("--quick", action="store_true", help="do not try to import torch")


def run(arguments: argparse.Namespace) -> int:
    """Print each finding on arrival; 1 after a failure."""
    findings: list[Finding] = []
    for finding in diagnose(torch=not arguments.quick):
        findings.append(finding)
        if not arguments.json and not _is_absent(finding):
            _print(finding)
    failures = sum(finding.level == "fail" for finding in findings)
    if arguments.json:
        print_json(findings)
    else:
        if absent := [finding for finding in findings if _is_absent(finding)]:
            print("\nnot installed, and not needed by a bus:")
            for finding in absent:
                print(f"      {finding.check.ljust(_NAME_WIDTH)}{finding.hint}")
        warnings = sum(finding.level == "warn" for finding in findings)
        verdict = f"{failures} failed" if failures else "all that a bus needs is here"
        print(f"\n{verdict}; {several(warnings, 'warning')}")
    return 1 if failures else 0


def _is_absent(finding: Finding) -> bool:
    return finding.level == "ok" and finding.found == NOT_INSTALLED


def _print(finding: Finding) -> None:
    name = finding.check.ljust(_NAME_WIDTH)
    print(f"{_MARKS[finding.level]}  {name}{printable(finding.found)}", flush=True)
    for line in textwrap.wrap(printable(finding.hint), _HINT_WIDTH):
        print(f"{'':{_NAME_WIDTH + 6}}{line}", flush=True)
    if finding.hint or finding.level != "ok":
        print(f"{'':{_NAME_WIDTH + 6}}see {PAGES[finding.check]}", flush=True)
