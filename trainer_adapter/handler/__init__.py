"""From groups to batches to acknowledgements: the handler, its prefetching, and its checkpoint."""
