"""Threads of a worker may meet in their first answers: no type's tables are built there."""

import pytest
from conftest import Spawner

#: msgspec reads a class's annotations where it builds the tables of a type. The interpreter may
#: switch threads meanwhile, and the process crashes in the other thread's half of a table.
FIRST = """
import contextlib, sys
import msgspec
from shmbus.handles import session

built = []
def look(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "get_class_annotations":
        built.append(frame.f_code.co_filename)

sys.setprofile(look)
with contextlib.suppress(msgspec.ValidationError):
    msgspec.json.decode(b"{}", type=getattr(session, sys.argv[1]))
sys.setprofile(None)
print(len(built), "built")
"""


@pytest.mark.parametrize("answer", ["PackedSample", "Opened", "_Answer", "_Told"])
def test_the_first_answer_of_a_worker_builds_no_table_of_its_type(
    spawn: Spawner, answer: str
) -> None:
    assert spawn.script(FIRST, answer, fresh=True).finish() == "0 built\n"
