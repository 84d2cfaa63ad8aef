"""How weights travel: carriers with one interface, each of which says what it promises.

`base` has the interface; a carrier is one file beside it, and a line in the table of `probe`.
"""
