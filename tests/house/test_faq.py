"""The manifest and the batch script of docs/faq.md work as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_style import ROOT

PAGE = (ROOT / "docs" / "faq.md").read_text()


def block(language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)
    assert len(found) == 1
    return str(found[0])


def test_the_manifest_gives_every_container_one_memory_volume_under_one_user() -> None:
    manifest = pytest.importorskip("yaml").safe_load(block("yaml"))
    spec = manifest["spec"]
    (volume,) = spec["volumes"]
    assert volume["emptyDir"]["medium"] == "Memory" and volume["emptyDir"]["sizeLimit"]
    assert spec["securityContext"]["runAsUser"] > 0
    for container in spec["containers"]:
        assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]
        assert container["resources"]["limits"]["memory"]
    # Stand-in of a cluster: the schema of its API, without unknown keys.
    pytest.importorskip("kubernetes_validate").validate(manifest, "1.30", strict=True)


def test_the_batch_script_ends_with_the_trainers_status_and_leaves_no_bus(tmp_path: Path) -> None:
    """Stand-ins: `srun` starts its command here, and the programs end at once."""
    job = str(os.getpid())
    for name, text in {
        "srun": '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n',
        "shmbus": f'#!/bin/sh\nexec {sys.executable} -m shmbus.cli "$@"\n',
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        "workers.py": (
            "import shmbus, sys\n"
            "with shmbus.Producer(sys.argv[1], wait=60.0) as producer:\n"
            "    producer.put('q', group_size=1, index=0, score=1.0)\n"
        ),
        "trainer.py": (
            "import shmbus, sys\n"
            "with shmbus.Consumer(sys.argv[1], wait=60.0, daemon=True) as consumer:\n"
            "    (group,) = consumer.take(timeout=60.0)\n"
            "    group.ack()\n"
            "sys.exit(7)\n"
        ),
        "job.sh": block("sh").replace("4GiB", "4MiB"),
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"SLURM_JOB_ID": job, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-n", "job.sh"], cwd=tmp_path, check=True)
    done = subprocess.run(
        ["bash", "job.sh"], cwd=tmp_path, env=environment, timeout=120, capture_output=True
    )
    assert done.returncode == 7, done.stderr.decode()
    assert not Path(f"/dev/shm/shmbus.run-{job}").exists()
