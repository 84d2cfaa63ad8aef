"""Data of a sample: schema, encoding, prompts, copies, status types."""
