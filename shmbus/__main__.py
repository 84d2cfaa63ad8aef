"""``python -m shmbus``: the command line, for a script outside of the path."""

import sys

from shmbus.cli import main

if __name__ == "__main__":
    sys.exit(main())
