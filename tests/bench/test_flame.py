"""A flame graph follows from what perf printed: made-up samples, whose shares are known."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from bench import flame

SVG = "{http://www.w3.org/2000/svg}"
SCRIPT = """
\t    7f01 __memmove_avx+0x51 (/usr/lib/libc.so.6)
\t    7f02 shmbus_copy+0x10 (/x/shmbus_ext/_core.cpython-311-x86_64-linux-gnu.so)
\t    7f03 _PyEval_EvalFrameDefault+0x1a (/x/libpython3.11.so.1.0)
\t    7f04 _PyObject_Call+0x1a (/x/libpython3.11.so.1.0)
\t    7f05 main+0x1 (/usr/bin/python3.11)

\tffff01 do_futex+0x2 ([kernel.kallsyms])
\t    7f02 shmbus_copy+0x10 (/x/shmbus_ext/_core.cpython-311-x86_64-linux-gnu.so)
\t    7f03 _PyEval_EvalFrameDefault+0x1a (/x/libpython3.11.so.1.0)
\t    7f05 main+0x1 (/usr/bin/python3.11)
"""


def test_stacks_begin_at_the_outermost_frame_and_the_interpreter_is_one() -> None:
    assert list(flame.fold(SCRIPT.splitlines())) == [
        ["main", "python", "shmbus: shmbus_copy", "__memmove_avx"],
        ["main", "python", "shmbus: shmbus_copy", "kernel: do_futex"],
    ]


def test_a_python_function_of_a_traced_interpreter_has_its_name() -> None:
    (stack,) = flame.fold([" 7f py::take:/x/consumer.py+0x0 (/tmp/perf-1.map)"])
    assert stack == ["python: take"]


def test_a_box_is_as_wide_as_its_share_and_stands_on_its_caller() -> None:
    root = flame.tree(flame.fold(SCRIPT.splitlines()), "put")
    assert root.samples == 2
    svg = ElementTree.fromstring(flame.draw(root, "put <of> 2 samples"))
    boxes = {}
    for group in svg.iter(f"{SVG}g"):
        title, rect = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        assert title is not None and rect is not None and title.text is not None
        name, _, share = title.text.rpartition(": ")
        boxes[name] = (share, float(rect.attrib["width"]), float(rect.attrib["y"]))
    assert boxes["shmbus: shmbus_copy"][:2] == ("100.0%", flame.WIDTH)
    assert boxes["kernel: do_futex"][:2] == ("50.0%", flame.WIDTH / 2)
    assert boxes["put"][2] > boxes["main"][2] > boxes["python"][2] > boxes["__memmove_avx"][2]


def test_what_could_not_be_read_is_left_out() -> None:
    stacks = [["main", "often"]] * 999 + [["main", "rare"]]
    drawn = flame.draw(flame.tree(stacks, "take"), "")
    assert "often" in drawn and "rare" not in drawn


def test_the_graphs_that_are_kept_are_small_and_whole() -> None:
    for name in flame.GRAPHS:
        path = flame.RESULTS / f"{name}.svg"
        assert path.stat().st_size < 150_000
        svg = ElementTree.fromstring(path.read_text())
        title = next(svg.iter(f"{SVG}title")).text
        assert title is not None and re.fullmatch(rf"{name}: 100.0%", title)
