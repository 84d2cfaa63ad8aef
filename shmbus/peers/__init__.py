"""Conversion of other training stacks' groups to records and back, for the gateway and adapters."""
