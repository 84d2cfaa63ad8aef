"""How weights travel: carriers with one interface, each of which says what it promises.

`base` has the interface. A carrier is the file of its name, those beside it that begin with that
name, and a line in the table of `probe`; what three of them share is `exported`.
"""
