"""A bus seen from outside, read-only: its bytes, its status, and leftovers of dead processes."""
