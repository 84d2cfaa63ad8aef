"""What other training stacks send, as records of a bus, and back: for the gateway and adapters."""
