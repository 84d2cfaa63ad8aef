"""A bus on disk: snapshots of undelivered trajectories."""
