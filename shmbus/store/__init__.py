"""A bus on disk: snapshots of undelivered trajectories, and captures of live traffic."""
