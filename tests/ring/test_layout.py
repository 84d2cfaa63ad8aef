"""The bytes of the segment are the ones that their version has always had."""

import json
import re
from pathlib import Path

from golden import make

LAYOUT = Path(__file__).parents[2] / "shmbus_ext" / "LAYOUT.md"


def test_no_byte_moves_without_a_new_layout_version(bus_name: str) -> None:
    assert make.golden(bus_name) == json.loads(make.path().read_text())


def test_the_record_that_the_documentation_shows_is_what_put_writes(bus_name: str) -> None:
    shown = [
        line[10:57]
        for line in LAYOUT.read_text().splitlines()
        if re.match(r"    [0-9a-f]{4}  (?:[0-9a-f]{2} ){16}", line)
    ]
    record = bytearray.fromhex(" ".join(shown))
    for part in make.VARYING:
        record[part] = bytes(part.stop - part.start)
    (written,) = [
        make.record_of(bus_name, put, False) for title, put in make.PUTS.items() if "md" in title
    ]
    assert bytes(record) == bytes.fromhex(" ".join(written))
