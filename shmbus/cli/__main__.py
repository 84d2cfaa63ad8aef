"""``python -m shmbus.cli``: the command line without an installed script."""

import sys

from shmbus.cli import main

sys.exit(main())
