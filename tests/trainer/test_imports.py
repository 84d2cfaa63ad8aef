"""Importing trainer_adapter is cheap: a name is loaded when it is first asked for."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_package_loads_neither_torch_nor_numpy_nor_the_bus() -> None:
    code = "import sys, trainer_adapter; print({'numpy', 'shmbus', 'torch'} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.returncode) == ("set()\n", 0), result.stderr
