"""Records from buses of many nodes to trainers' buses.

Invariants:

- A record is in its source's ring until the source releases it; all that others know of it can be
  asked for again.
- What a sink has put and its source has not released is in the sink's journal, which outlives it.
- A source, the coordinator and a sink are pure state machines, without clock, socket or thread:
  messages come in, and messages go out. A party has one of them, a bus, and a mailbox.
- Messages may be late, lost or doubled. What a party awaits it asks for again.
"""
