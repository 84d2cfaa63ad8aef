"""``shmbus doctor``: findings with hints, and an exit status that scripts can use."""

import json
import os
import pwd
import re
import subprocess
import sys
from pathlib import Path

import pytest
from operators import cli

import shmbus
from shmbus.cli import doctor

CHECKS = {
    "shm", "memory", "open_files", "locked_memory", "huge_pages", "kernel", "file_locks", "cpu",
    "python", "shmbus", "numpy", "msgspec", "uvloop", "prometheus_client",
    "safetensors", "logout", "round_trip", "leftovers", "torch",
}  # fmt: skip


def test_doctor_passes_where_the_tests_pass_and_does_not_load_torch_itself() -> None:
    code = (
        "import sys; from shmbus.cli import main; status = main(['doctor', '--json']);"
        "sys.exit(status or any(name.startswith('torch') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert findings.keys() >= CHECKS
    assert {f["level"] for f in findings.values()} <= {"ok", "warn"}
    assert findings["shmbus"]["found"].startswith(f"shmbus {shmbus.__version__}")
    assert findings["file_locks"]["level"] == findings["round_trip"]["level"] == "ok"
    assert "CPU only" in findings["torch"]["found"] or "CUDA" in findings["torch"]["found"]
    for finding in findings.values():
        assert finding["hint"] or finding["level"] == "ok", finding


def test_doctor_prints_a_line_a_check_and_a_verdict_and_leaves_nothing_behind() -> None:
    result = cli("doctor", "--quick")
    assert result.status == 0
    assert "all that a bus needs is here" in result.out
    assert "round_trip" in result.out
    assert not re.search("^ok.*not installed", result.out, re.MULTILINE)
    assert not result.left_behind()


def test_doctor_says_what_pages_a_bus_really_has() -> None:
    finding = next(f for f in doctor.diagnose() if f.check == "huge_pages")
    with shmbus.Bus.create(unique := f"pages-{os.getpid()}", "8MiB"):
        ours = Path("/proc/self/smaps").read_text().partition(f"shmbus.{unique}")[2]
    mapped = int(ours.partition("ShmemPmdMapped:")[2].split()[0])
    assert (finding.found == "a bus lies in huge pages") == (mapped > 0)
    assert bool(finding.hint) == (mapped == 0)


def test_a_check_keeps_its_name_where_it_cannot_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {finding.check for finding in doctor.diagnose(torch=False)}
    monkeypatch.setattr(doctor, "_SHM", tmp_path / "missing")
    findings = {finding.check: finding.level for finding in doctor.diagnose(torch=False)}
    assert findings["file_locks"] == "warn" and findings.keys() <= names


def test_a_failing_check_gives_status_1_with_a_hint(tmp_path: Path) -> None:
    # A file size limit below any bus: what a user meets who set ulimit -f.
    command = f"ulimit -f 64; exec {sys.executable} -m shmbus.cli doctor --quick"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 1
    assert "FAIL" in done.stdout and "1 failed" in done.stdout
    assert "ulimit -f unlimited" in done.stdout


def test_a_tighter_cgroup_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "proc/self/cgroup": "0::/pod/job\n",
        "proc/self/mountinfo": "30 29 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/pod/memory.max": str(8 << 20),
        "sys/fs/cgroup/pod/memory.current": str(5 << 20),
        "sys/fs/cgroup/pod/job/memory.max": "max",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(doctor, "_ROOT", tmp_path)
    [finding] = doctor._check_memory()
    assert finding.level == "warn"
    assert "/sys/fs/cgroup/pod has 3.0 MiB free of 8.0 MiB" in finding.found


def test_a_broken_torch_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libcuda.so.1 is broken')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    finding = doctor._check_torch(True)
    assert finding.level == "warn"
    assert "libcuda.so.1 is broken" in finding.found


ORDINARY = pwd.struct_passwd(("ada", "x", 1234, 1234, "", "/", "/bin/sh"))
SYSTEM = pwd.struct_passwd(("trainer", "x", 999, 999, "", "/", "/bin/sh"))


@pytest.mark.parametrize(
    ("user", "files", "level", "says"),
    [
        (ORDINARY, {}, "warn", "loginctl enable-linger ada; or RemoveIPC=no"),
        (ORDINARY, {"var/lib/systemd/linger/ada": ""}, "ok", "ada lingers"),
        (SYSTEM, {}, "ok", "trainer is a system user"),
        (ORDINARY, {"etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\n"}, "ok", "RemoveIPC=no"),
        (ORDINARY, {"etc/systemd/logind.conf": "[Login]\n#RemoveIPC=no\n"}, "warn", "linger"),
        (
            ORDINARY,
            {
                "etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\n",
                "usr/lib/systemd/logind.conf.d/90-ipc.conf": "[Login]\nRemoveIPC=yes\n",
            },
            "warn",
            "linger",
        ),
        (
            ORDINARY,
            {
                "usr/lib/systemd/logind.conf.d/90-ipc.conf": "[Login]\nRemoveIPC=yes\n",
                "etc/systemd/logind.conf.d/90-ipc.conf": "[Login]\nRemoveIPC = false\n",
            },
            "ok",
            "RemoveIPC=no",
        ),
        (ORDINARY, {"etc/systemd/logind.conf": "no section\n\x00"}, "warn", "linger"),
    ],
)
def test_what_a_logout_takes_is_told_with_its_cure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    user: pwd.struct_passwd,
    files: dict[str, str],
    level: str,
    says: str,
) -> None:
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(doctor, "_ROOT", tmp_path)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    (finding,) = [f for f in doctor.diagnose(torch=False) if f.check == "logout"]
    assert finding.level == level
    assert says in f"{finding.found} {finding.hint}"
