"""Measurements of shmbus on the machine that they run on; ``python -m bench.run`` runs them all."""
