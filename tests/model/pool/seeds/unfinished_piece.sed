# options: --scenario ranks --preemptions 1 --deaths 1 --delays 0
# A rank that has died is taken for one that has written its piece.
s/return begun ? PIECE_DEAD : PIECE_ABSENT;/return begun ? PIECE_DONE : PIECE_ABSENT;/
