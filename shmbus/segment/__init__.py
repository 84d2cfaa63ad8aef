"""A bus as a file: its name, creating, opening and removing it, and why that failed."""
