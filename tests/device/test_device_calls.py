"""Calls of a driver by their addresses: a driver of Python functions takes the place of CUDA's."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import pytest
import torch

from shmbus.device_calls import (
    DEVICE_MAX_COPIES,
    DEVICE_NOT_READY,
    device_await,
    device_copy,
    device_launch,
)

COPY = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
)
RECORD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
QUERY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
STREAM, EVENT = 0x10, 0x20
NEVER_S = 3600.0
REFUSED = 700


class Driver:
    """Copies at once, and notes what it was asked."""

    def __init__(self, refuses: int = -1) -> None:
        self.asked: list[Any] = []

        def copy(to: int, source: int, size: int, stream: int) -> int:
            self.asked.append(("copy", size, stream))
            if len(self.asked) > refuses >= 0:
                return REFUSED
            ctypes.memmove(to, source, size)
            return 0

        def record(event: int, stream: int) -> int:
            self.asked.append(("record", event, stream))
            return 0

        self._calls = COPY(copy), RECORD(record)

    def addresses(self) -> tuple[int, int]:
        copy, record = (ctypes.cast(call, ctypes.c_void_p).value for call in self._calls)
        assert copy is not None and record is not None
        return copy, record


def places(targets: list[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((each.data_ptr(), each.nbytes) for each in targets)


def test_copies_are_made_in_order_and_the_event_is_recorded_behind_them() -> None:
    driver = Driver()
    sources = {"a": torch.arange(7), "b": torch.full((3, 5), 2.5)}
    targets = [torch.zeros_like(each) for each in sources.values()]
    status = device_copy(*driver.addresses(), STREAM, EVENT, sources, places(targets))
    assert status == 0
    assert driver.asked == [("copy", 56, STREAM), ("copy", 60, STREAM), ("record", EVENT, STREAM)]
    assert all(map(torch.equal, targets, sources.values()))


def test_what_the_driver_refuses_ends_the_rest() -> None:
    driver = Driver(refuses=1)
    sources = {name: torch.ones(4) for name in "abc"}
    targets = [torch.zeros(4) for _ in sources]
    status = device_copy(*driver.addresses(), STREAM, EVENT, sources, places(targets))
    assert status == REFUSED
    assert [name for name, *_ in driver.asked] == ["copy", "copy"]
    assert [bool(each.any()) for each in targets] == [True, False, False]


class NoTensor:
    """Says no address."""

    def data_ptr(self) -> int:
        raise ZeroDivisionError


def test_nothing_is_copied_of_what_is_no_step() -> None:
    driver = Driver()
    one = torch.ones(4)
    target = places([torch.zeros(4)])
    many = {str(number): one for number in range(DEVICE_MAX_COPIES + 1)}
    for error, tensors, to in (
        (ValueError, {"a": one, "b": one}, target),
        (ValueError, [one], target),
        (ValueError, many, target * len(many)),
        (TypeError, {"a": one}, ((1, 2, 3),)),
        (ZeroDivisionError, {"a": NoTensor()}, target),
    ):
        with pytest.raises(error):
            device_copy(*driver.addresses(), STREAM, EVENT, tensors, to)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        device_copy(*driver.addresses(), STREAM, EVENT, {"a": one})  # type: ignore[call-arg]
    assert driver.asked == []


LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *(ctypes.c_uint,) * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)


def test_a_launch_has_its_addresses_then_its_numbers_and_no_scratch_memory() -> None:
    told: list[Any] = []

    def launch(function: int, *given: Any) -> int:
        (*sizes, shared, stream, parameters, extra) = given
        wide = [ctypes.c_uint64.from_address(parameters[i]).value for i in (0, 1, 4, 5)]
        narrow = [ctypes.c_int32.from_address(parameters[i]).value for i in (2, 3)]
        told.append((function, sizes, shared, stream, wide, narrow, extra))
        return REFUSED

    call = LAUNCH(launch)
    at = ctypes.cast(call, ctypes.c_void_p).value
    assert at is not None
    big = (1 << 63) + 5
    assert device_launch(at, 0x30, STREAM, 7, 512, 48, (big, 9), (11, -3)) == REFUSED
    assert told == [(0x30, [7, 1, 1, 512, 1, 1], 48, STREAM, [big, 9, 0, 0], [11, -3], None)]
    for error, addresses, numbers in (
        (ValueError, (1,) * 30, (1,) * 3),
        (OverflowError, (1,), (1 << 31,)),
        (OverflowError, (-1,), ()),
        (TypeError, ("1",), ()),
    ):
        with pytest.raises(error):
            device_launch(at, 0x30, STREAM, 1, 32, 0, addresses, numbers)  # type: ignore[arg-type]
    assert len(told) == 1


class Event:
    """Happens when it is told; knows in which threads it was looked at."""

    def __init__(self) -> None:
        self.status = DEVICE_NOT_READY
        self.looks = 0

        def query(event: int) -> int:
            assert event == EVENT
            self.looks += 1
            return self.status

        self._call = QUERY(query)

    def address(self) -> int:
        found = ctypes.cast(self._call, ctypes.c_void_p).value
        assert found is not None
        return found


@pytest.mark.timeout(60)
def test_an_event_is_awaited_while_other_threads_run() -> None:
    event, found = Event(), []

    def wait() -> None:
        found.append(device_await(event.address(), EVENT, 0.001, True))

    thread = threading.Thread(target=wait)
    thread.start()
    while event.looks < 10:
        time.sleep(0.001)
    assert found == []
    event.status = 0
    thread.join(30)
    assert found == [0]


def test_one_that_may_not_sleep_ends_with_its_time_and_an_error_ends_either() -> None:
    event = Event()
    assert device_await(event.address(), EVENT, 0.002, False) == DEVICE_NOT_READY
    assert event.looks > 1
    event.status = REFUSED
    assert device_await(event.address(), EVENT, NEVER_S, True) == REFUSED
    assert device_await(event.address(), EVENT, 0.0, False) == REFUSED
