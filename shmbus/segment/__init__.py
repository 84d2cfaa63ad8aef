"""A bus as a file: its name, creation, opening and removal, and the reasons for failures."""
