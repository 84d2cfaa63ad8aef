"""Limits, arguments, formats and waits: for each other room."""
