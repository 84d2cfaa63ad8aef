"""Training stacks on a bus, through their own hooks: one module per stack.

Invariant: importing a module here loads neither torch nor the adapted stack.
"""
