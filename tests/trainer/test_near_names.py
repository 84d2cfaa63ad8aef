"""What other libraries call an option of a handler is answered with the handler's own name."""

from __future__ import annotations

import inspect

import shmbus
from trainer_adapter import OnlineDataHandler
from trainer_adapter._near_names import SYNONYMS


def test_each_synonym_leads_to_an_option_that_there_is_and_is_none_itself() -> None:
    options = {
        *inspect.signature(OnlineDataHandler).parameters,
        *inspect.signature(shmbus.Consumer).parameters,
    } - {"name"}
    assert {name for names in SYNONYMS.values() for name in names} <= options
    assert not options & SYNONYMS.keys()
