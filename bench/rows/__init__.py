"""The rows of shmbus itself: each file measures one row of `bench.run`, or a family of rows."""
