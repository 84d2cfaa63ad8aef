"""``python -m bench``, which ``shmbus bench`` and ``make bench`` run."""

import sys

if __name__ == "__main__":
    # Not at the top: a spawned process imports this module, and needs none of it.
    from bench.suite import main

    sys.exit(main())
