"""How weights travel: a file a carrier, and a line in `CARRIERS` of `weights/probe.py`."""
