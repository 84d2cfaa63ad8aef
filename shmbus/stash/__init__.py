"""Grouping: the stash makes groups of samples, failing ones included; the collector feeds it."""
