"""The rows of shmbus itself, one file a family; `bench.suite` lists them."""
