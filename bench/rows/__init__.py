"""What `bench.run` measures of shmbus itself: one file a row of its table, or a family of rows."""
