"""Goodput under faults: what a trainer trains once of the tokens that a worker handed over.

`bench.goodput.run` is the program, `scenario` the run's plan, `host` the supervisor of a run,
`party` the engine, the workers and the trainer, `books` the count of tokens, and `adapters` the
contenders. All but `run` import the standard library and NumPy alone, since a contender's
environment has no more.
"""
