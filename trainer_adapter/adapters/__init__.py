"""Other training stacks on a bus, through the hooks that they offer: one module a stack.

Invariant: importing a module here loads neither torch nor the stack that it adapts.
"""
