"""From groups to batches to acknowledgements: handler, planner, prefetching and checkpoint."""
