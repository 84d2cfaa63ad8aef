"""A bus on disk: snapshots of what was not delivered, and captures of what passed."""
