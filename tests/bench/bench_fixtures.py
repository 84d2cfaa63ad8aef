"""Processes of measurements that fork from an importing parent: figures of tests do not count."""

import os
from collections.abc import Iterator

import pytest
from fork_server import FUNCTIONS

from bench import processes


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    before = os.environ.get(processes.TEMPLATE)
    processes.use_template(*FUNCTIONS)
    processes.context.cache_clear()
    yield
    os.environ.pop(processes.TEMPLATE)
    if before is not None:
        os.environ[processes.TEMPLATE] = before
    processes.context.cache_clear()
