"""Imports are cheap: a name is loaded when it is first asked for, and no more than it needs."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_package_loads_neither_torch_nor_numpy_nor_the_bus() -> None:
    code = "import sys, trainer_adapter; print({'numpy', 'shmbus', 'torch'} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.returncode) == ("set()\n", 0), result.stderr


def test_weights_and_channels_load_no_module_of_sharded_tensors() -> None:
    code = (
        "import sys, shmbus.tensors, shmbus.engines, shmbus.weights;"
        "from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber;"
        "print('torch' in sys.modules, 'torch.distributed.tensor' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.returncode) == ("True False\n", 0), result.stderr
