"""Numbers of a body as arrays: at exactly the values that Python's own parser gives, or not."""

from __future__ import annotations

import json
import random
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmbus.gateway.group_json import decode_groups
from shmbus.http.access import Refusal
from shmbus.peers import atropos
from shmbus_ext import _core

TABLE = Path(__file__).resolve().parents[2] / "shmbus_ext" / "gateway" / "powers_of_five.h"
KINDS = {"ints": False, "floats": True}


def lifted(text: str) -> Any:
    """The arrays of an object's lists, as lists; None where it is not plain."""
    found = _core.lift_numbers(text.encode(), KINDS)
    if found is None:
        return None
    rest, arrays = found
    return {**json.loads(rest), **{key: [r.tolist() for r in rows] for key, rows in arrays.items()}}


def one_of(key: str, text: str) -> Any:
    """One number; None where it is not plain."""
    found = lifted(f'{{"{key}": [[{text}]]}}')
    return None if found is None else found[key][0][0]


def bits(value: float) -> bytes:
    """What tells 0.0 from -0.0 too."""
    return struct.pack("<d", value)


def test_the_table_of_powers_is_right() -> None:
    found = re.findall(r"UINT64_C\((0x\w+)\), UINT64_C\((0x\w+)\)", TABLE.read_text())
    table = [int(high, 16) << 64 | int(low, 16) for high, low in found]
    expected = []
    for power in range(-64, 65):
        five = 5 ** abs(power)
        length = five.bit_length()
        if power >= 0:
            expected.append(five << 128 - length if length <= 128 else five >> length - 128)
        else:
            # The power of two just above: 2^z >= 5^-power.
            shift = (five - 1).bit_length()
            whole = (1 << shift + 127) // five + 1
            if power < -27:
                whole = (1 << 2 * shift + 128) // five + 1
                whole >>= whole.bit_length() - 128
            expected.append(whole)
    assert table == expected


@pytest.mark.parametrize(
    "text",
    [
        "0", "-0.0", "0.0", "1", "-1", "0.1", "-0.6931471805599453", "1e22", "1e23", "8.41e21",
        "9007199254740993", "9007199254740992.5", "9223372036854775807", "5e-60", "1.5E+3",
        "0.000001234567890123456789", "2.2250738585072014e-20", "123456789012345678",
    ],
)  # fmt: skip
def test_a_double_is_the_nearest_one(text: str) -> None:
    assert bits(one_of("floats", text)) == bits(float(text))


def test_any_double_comes_back_bit_by_bit(seed: int) -> None:
    dice = random.Random(seed)
    plain = 0
    for _ in range(20_000):
        exponent = dice.randint(-66, 66)
        text = dice.choice(
            (
                repr(dice.uniform(-1, 1) * 10.0**exponent),
                f"{dice.getrandbits(dice.randint(1, 63))}",
                f"{dice.getrandbits(60)}e{exponent}",
                # Just between two doubles, and next to that.
                f"{2 * (2**52 + dice.getrandbits(51)) + 1}e{dice.randint(0, 2)}",
                f"-{2**52 + dice.getrandbits(52)}.5",
            )
        )
        value = one_of("floats", text)
        plain += value is not None
        assert value is None or bits(value) == bits(float(text)), text
    assert plain > 15_000


@pytest.mark.parametrize("separator", [", ", ",", ",  ", " , ", ",\n", ",\t "])
def test_numbers_in_a_list_are_those_of_json_whatever_stands_between_them(
    seed: int, separator: str
) -> None:
    dice = random.Random(seed)
    ints, floats = [], []
    for _ in range(3000):
        ints.append(str(dice.choice((-1, 1)) * dice.getrandbits(dice.randint(1, 63))))
        point = dice.randint(0, 20)
        digits = "".join(dice.choice("0123456789") for _ in range(point))
        first = dice.choice(("0", "0", str(dice.randint(1, 9)), str(dice.getrandbits(20))))
        floats.append(
            dice.choice(("-", ""))
            + first
            + (f".{digits}" if digits else "")
            + dice.choice(("", "", "", f"e{dice.randint(-40, 40)}"))
        )
    # A number that is not plain leaves its whole list to another parser.
    floats = [text for text in floats if one_of("floats", text) is not None]
    assert len(floats) > 2000
    text = f'{{"ints": [[{separator.join(ints)}]], "floats": [[{separator.join(floats)}]]}}'
    found = lifted(text)
    assert found["ints"][0] == [int(each) for each in ints]
    # By the parser, for which "-0" is an integer, without a sign.
    values = [float(json.loads(each)) for each in floats]
    assert list(map(bits, found["floats"][0])) == list(map(bits, values))


@pytest.mark.parametrize("behind", ["", "1", "12345678", "a", "]]", '"', " ", "\\"])
def test_a_number_that_another_byte_follows_is_that_of_json_or_none(behind: str) -> None:
    # Far from the end, where eight bytes are read at once, and at the end.
    for rest in (", 1" * 40, ""):
        for number in ("1234567", "0.123456789012345", "1.5"):
            text = f"{number}{behind}"
            for key in ("ints", "floats"):
                found = lifted(f'{{"{key}": [[{text}{rest}]]}}')
                try:
                    value = json.loads(f"[{text}{rest}]")
                except ValueError:
                    assert found is None, text
                    continue
                assert found is None or found[key][0] == value, text
                assert found is None or key == "floats" or isinstance(value[0], int)


@pytest.mark.parametrize("number", [0, -1, 150_000, 2**63 - 1, -(2**63), 10**18])
def test_an_integer_comes_back(number: int) -> None:
    assert one_of("ints", str(number)) == number


@pytest.mark.parametrize(
    "text",
    [
        "1.0", "1e3", "9223372036854775808", "-9223372036854775809", "99999999999999999999", "01",
        "-", "+1", "", "1 2", "[1]", "true", "null", '"1"', "1,", ",1", "NaN", "0x1", "1_0", "٣",
    ],
)  # fmt: skip
def test_what_is_no_plain_integer_is_left_alone(text: str) -> None:
    assert lifted(f'{{"ints": [[{text}, 5]]}}') is None


def test_digits_that_overflow_to_zero_are_not_taken_for_a_zero() -> None:
    # 10^64 and above are 0 in 64 bits.
    assert one_of("floats", f"1{'0' * 84}.7") is None


@pytest.mark.parametrize("text", ["1.", ".5", "1e", "1e+", "--1", "Infinity", "1e99999", "1e300"])
def test_what_is_no_plain_double_is_left_alone(text: str) -> None:
    assert lifted(f'{{"floats": [[{text}]]}}') is None


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}x", '{"ints": [[1]]', '{"ints": [[1]]}}', '{"ints": [[1]], "ints": [[2]]}',
        '{"i\\u006ets": [[1]]}', '{"ints" [[1]]}', '{"ints": [[1],]}', '{"ints": [[1] [2]]}',
        '{"ints": [[1]], }', '{ints: [[1]]}', '{"x": "open}', '{"ints": [1]}', "{",
    ],
)  # fmt: skip
def test_what_is_no_plain_object_is_left_alone(text: str) -> None:
    assert _core.lift_numbers(text.encode(), KINDS) is None


def test_what_stands_around_the_lists_stays_as_it_was() -> None:
    text = '\n{"a" : "]}\\\\\\"[", "ints":[ [ 1 ,2 ],[]], "b": [{"ints": [[3]]}], "floats" : [] } '
    assert lifted(text) == {**json.loads(text), "ints": [[1, 2], []], "floats": []}


def test_mutated_bodies_are_read_alike_or_left_alone(seed: int) -> None:
    dice = random.Random(seed)
    text = '{"ints": [[1, 20, 300], []], "floats": [[-0.5, 1e-3]], "x": {"y": ["\\"}", null]}}'
    for _ in range(20_000):
        changed = list(text)
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(len(changed))
            changed[at : at + dice.randint(0, 2)] = dice.choice(
                '0159-.eE+[]{},:"\\ nt'
            ) * dice.randint(0, 2)
        mutated = "".join(changed)
        found = _core.lift_numbers(mutated.encode(), KINDS)
        if found is None:
            continue
        rest, _ = found
        try:
            expected = json.loads(mutated)
        except ValueError:
            with pytest.raises(ValueError):
                json.loads(rest)
            continue
        assert lifted(mutated) == expected, mutated


def group(**changes: Any) -> bytes:
    """A body."""
    content = {"tokens": [[1, 2], [3]], "masks": [[1, 2], [3]], "scores": [0.5, 1]}
    return json.dumps({**content, **changes}).encode()


def test_a_body_has_arrays_where_it_is_plain_and_equal_lists_where_it_is_not() -> None:
    plain = group(advantages=[[0.1, 0.2], [1]], ref_logprobs=None, messages=[[], []], env_id=3)
    # A number that is true is read another way.
    other = plain.replace(b'"scores": [0.5, 1]', b'"scores": [0.5, true]')
    [arrays] = decode_groups(plain, several=False)
    [lists] = decode_groups(other, several=False)
    assert isinstance(arrays.tokens[0], np.ndarray)
    assert isinstance(lists.tokens[0], list)
    for name in arrays.__struct_fields__:
        found, expected = getattr(arrays, name), getattr(lists, name)
        if name in ("tokens", "masks", "advantages"):
            found = [row.tolist() for row in found]
        assert found == expected, name
    [again, also] = decode_groups(b"[" + plain + b"," + plain + b"]", several=True)
    assert [row.tolist() for row in again.tokens] == [row.tolist() for row in also.tokens]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "Expected `array`, got `int` - at `$.tokens`"),
        ({"advantages": 0}, "Expected `array | null`, got `int` - at `$.advantages`"),
        ({"tokens": [[1, 2.5]]}, "at `$.tokens[0][1]`"),
        ({"masks": [[1], None]}, "at `$.masks[1]`"),
        ({"tokens": [["a"]]}, "at `$.tokens[0][0]`"),
        ({"advantages": [[float("nan")]]}, "NaN: expected finite numbers"),
    ],
)
def test_what_is_wrong_is_named_as_before(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal) as caught:
        decode_groups(group(**changes), several=False)
    assert message in caught.value.message


@pytest.mark.parametrize("token", [1e300, -1e300, 2.0**63, 1.5])
def test_a_token_that_is_no_64_bit_integer_is_refused_without_a_warning(token: float) -> None:
    group = {"tokens": [[1, token]], "masks": [[1, 1]], "scores": [1.0]}
    with pytest.raises(ValueError, match="a number that is no 64-bit integer"):
        atropos.samples_of(group)
