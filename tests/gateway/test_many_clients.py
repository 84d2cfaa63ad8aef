"""Memory of a gateway under many clients (SHMBUS_GATEWAY_CLIENTS, 1000 say)."""

import faulthandler
import os

import pytest

from bench.gateway import peak
from shmbus.gateway import settings

CLIENTS = int(os.environ.get("SHMBUS_GATEWAY_CLIENTS", "40"))
MEGABYTES = 10.0
CONNECTION_BYTES = 320 << 10
PROGRAM_BYTES = 64 << 20


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_memory_stays_below_its_bound_and_every_group_comes_once() -> None:
    # Its own limit, above, is longer than that of a test which hangs.
    faulthandler.cancel_dump_traceback_later()
    _, most = peak(CLIENTS, MEGABYTES)
    print(f"{most >> 20} MiB at the most")
    bound = settings.MEMORY + 6 * settings.BODY_LIMIT + CLIENTS * CONNECTION_BYTES + PROGRAM_BYTES
    assert most < bound
