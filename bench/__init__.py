"""Measurements of shmbus and of other ways to move a trajectory; `bench.suite` runs them all."""
