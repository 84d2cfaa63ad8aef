"""A subinterpreter is refused in words, and leaves the main interpreter as it was."""

import pytest
from conftest import Spawner

CHILD = """
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters

name, loaded = sys.argv[1], sys.argv[2] == "loaded"
if loaded:
    import shmbus
    bus = shmbus.Bus.create(name, "256KiB")

for _ in range(2):
    inner = interpreters.create()
    code = f'''
import sys
sys.path[:] = {sys.path!r}
try:
    import shmbus
except ImportError as error:
    said = str(error)
else:
    said = "it was imported"
assert "expected a process's main interpreter, got a subinterpreter" in said, said
'''
    failed = interpreters.run_string(inner, code)
    assert not failed, failed
    interpreters.destroy(inner)

import numpy as np
import shmbus
if not loaded:
    bus = shmbus.Bus.create(name, "256KiB")
with bus, shmbus.Producer(name) as producer, shmbus.Consumer(name) as consumer:
    producer.put("a", group_size=1, index=0, x=np.arange(3))
    (group,) = consumer.take(timeout=5)
    assert group[0]["x"].sum() == 3
print("fine")
"""


@pytest.mark.parametrize("main", ["loaded", "not loaded"])
def test_an_import_in_a_subinterpreter_says_what_to_do_and_harms_nothing(
    bus_name: str, spawn: Spawner, main: str
) -> None:
    pytest.importorskip("_interpreters" if _has("_interpreters") else "_xxsubinterpreters")
    child = spawn.script(CHILD, bus_name, main)
    assert child.popen.wait(60) == 0, child.output()
    assert "fine" in child.output()


def _has(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True
