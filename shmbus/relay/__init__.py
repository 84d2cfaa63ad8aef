"""Records from buses of many nodes to trainers' buses: pure state machines, which know no network.

Invariants:

- A record is in its source's ring until the source releases it; all that others know of it can be
  asked for again.
- What a sink has put and its source has not released is in the sink's journal, which outlives it.
- Nothing here has a clock, a socket or a thread: messages come in, and messages go out.
"""
