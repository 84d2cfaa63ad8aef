"""Grouping: the stash groups samples, failing groups included; the collector feeds the stash."""
