"""One hop of trajectories between two Ray nodes of this machine: the relay beside its bounds.

`python -m bench.relay` prints JSON. All of one run, so that ratios count; both nodes share this
machine's processors. Needs the extra `ray`.
"""

import os
import secrets

# Read when Ray is imported, and by its services.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
