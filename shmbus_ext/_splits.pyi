"""The functions of the C core on splits and rounds, for type checkers; they are in ``_core``."""

from shmbus_ext._core import Segment

NO_ROUND: int
MAX_SPLITS: int
SPLIT_TRAIN: int
SPLIT_LABEL_BYTES: int
TRAIN: str
CANCELLED_GROUPS: int

def check_split(label: object, /) -> None: ...
def split_number(segment: Segment, label: str, /) -> int: ...
def split_label(segment: Segment, number: int, /) -> str: ...
def splits(segment: Segment, /) -> list[tuple[int, str, int, int, int, int, int]]: ...
