"""Grouping: which samples make a group, which groups fail, and who collects them from the ring."""
