"""``python -m bench.goodput``."""

import sys

if __name__ == "__main__":
    from bench.goodput.run import main

    sys.exit(main())
