"""What other libraries call an option of a handle is answered with the handle's own name."""

import inspect
from typing import Any

import pytest

import shmbus
from shmbus.base.near_names import OPTIONS
from trainer_adapter import OnlineDataHandler


def test_each_synonym_leads_to_an_option_that_there_is_and_is_none_itself() -> None:
    options = {
        *inspect.signature(OnlineDataHandler).parameters,
        *inspect.signature(shmbus.Consumer).parameters,
    }
    assert {name for names in OPTIONS.values() for name in names} <= options
    assert OPTIONS.keys() & options == {"name"}  # the handler's own is `bus`


@pytest.mark.parametrize(
    ("handle", "wrong", "said"),
    [
        (shmbus.Consumer, "max_staleness", "did you mean 'max_policy_lag'?"),
        (shmbus.Consumer, "group_time_out", "did you mean 'group_timeout'"),
        (shmbus.Consumer, "batch_size", "expected one of name, group_timeout, on_timeout, "),
        (shmbus.Producer, "check_sum", "did you mean 'checksum'?"),
        (shmbus.Producer, "bus_name", "did you mean 'name'?"),
        (shmbus.Producer, "timeout", "expected one of name, checksum, label, "),
    ],
)
def test_a_wrong_keyword_of_a_handle_shows_its_options(handle: Any, wrong: str, said: str) -> None:
    with pytest.raises(TypeError) as caught:
        handle("nobody", **{wrong: 1})
    named = f"{handle.__name__} got an unexpected keyword argument {wrong!r}; {said}"
    assert str(caught.value).startswith(named)
