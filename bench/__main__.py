"""``python -m bench``, which ``shmbus bench`` and ``make bench`` run."""

import sys

if __name__ == "__main__":
    # Imported late: a spawned process imports this module without need of the rows.
    from bench.suite import main

    sys.exit(main())
