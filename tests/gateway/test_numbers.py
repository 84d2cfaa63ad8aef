"""Numbers of a body: as they were sent, or refused by name."""

import json
from typing import Any

import pytest

from shmbus.gateway.group_json import decode_groups
from shmbus.peers import atropos


def group(**changes: Any) -> bytes:
    content = {"tokens": [[1, 2], [3]], "masks": [[1, 2], [3]], "scores": [0.5, 1]}
    return json.dumps({**content, **changes}).encode()


def test_numbers_written_as_booleans_are_those_numbers() -> None:
    plain = group(advantages=[[0.1, 0.2], [1]], ref_logprobs=None, messages=[[], []], env_id=3)
    other = plain.replace(b'"scores": [0.5, 1]', b'"scores": [0.5, true]')
    found = decode_groups(plain, several=False)
    assert found == decode_groups(other, several=False)
    assert found * 2 == decode_groups(b"[" + plain + b"," + plain + b"]", several=True)


@pytest.mark.parametrize("token", [1e300, -1e300, 2.0**63, 1.5])
def test_a_token_that_is_no_64_bit_integer_is_refused_without_a_warning(token: float) -> None:
    group = {"tokens": [[1, token]], "masks": [[1, 1]], "scores": [1.0]}
    with pytest.raises(ValueError, match="a number that is no 64-bit integer"):
        atropos.samples_of(group)
