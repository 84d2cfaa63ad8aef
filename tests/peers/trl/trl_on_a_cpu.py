"""Run a script with TRL's asynchronous trainer on a CPU: ``trl_on_a_cpu.py SCRIPT [ARGUMENTS]``."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from tiny import on_a_cpu

if __name__ == "__main__":
    on_a_cpu()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
