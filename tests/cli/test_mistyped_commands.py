"""Mistyped commands."""

import pytest
from operators import usage


@pytest.mark.parametrize(
    ("word", "meant"),
    [("stats", "status"), ("Status", "status"), ("snapshoot", "snapshot"), ("ls", "list"),
     ("unlink", "rm"), ("delete", "rm"), ("clean", "gc"), ("serv", "serve"), ("doktor", "doctor")],
)  # fmt: skip
def test_a_mistyped_command_is_named_with_the_one_that_was_meant(word: str, meant: str) -> None:
    result = usage(word, "run1")
    assert (result.status, result.out) == (2, "")
    assert f"there is no command {word!r}; did you mean {meant!r}?" in result.err
    assert "inspect" in result.err  # and the others


def test_a_command_that_is_like_none_has_the_list_and_no_guess() -> None:
    result = usage("xyzzy")
    assert result.status == 2 and "did you mean" not in result.err
    assert "expected one of serve, status," in result.err
