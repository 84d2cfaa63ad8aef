"""How weights travel. Each carrier is a line in `CARRIERS` of `shmbus/weights/probe.py`."""
