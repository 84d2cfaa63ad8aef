"""``python -m bench.report``: make the tables and plots of a run again."""

from __future__ import annotations

import sys

from bench.report.report import main

if __name__ == "__main__":
    sys.exit(main())
