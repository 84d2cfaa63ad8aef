"""The log's line for each request: written as the log writes its own, without a record for it.

A record of the standard library costs several times what is in the line. Invariants: the lines are
those of `shmbus.daemon.logs`, in both forms; a request is one line, whatever its client sends.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Final

from shmbus.gateway.settings import Settings

__all__ = ["RequestLog"]

#: What the lines are said to come from.
_LOGGER: Final = "shmbus.gateway.access"
#: Characters of a path that are written.
_PATH_CHARS: Final = 200


class RequestLog:
    """Writes to stderr.

    Parameters
    ----------
    settings : Settings
        Its form, its level, and the bus that each line names.

    Attributes
    ----------
    ordinary, polled : bool
        Whether requests are written, and whether those are that are polled many times a second.
    """

    def __init__(self, settings: Settings) -> None:
        level = getattr(logging, settings.log_level.upper())
        self.ordinary = level <= logging.INFO
        self.polled = level <= logging.DEBUG
        self._bus = settings.bus
        self._is_json = settings.log_format == "json"
        #: The second of the last line, and as text.
        self._second = 0
        self._text = ""

    def _time(self) -> str:
        now_s = time.time()
        second = int(now_s)
        if second != self._second:
            form = "%Y-%m-%dT%H:%M:%S" if self._is_json else "%Y-%m-%d %H:%M:%S"
            self._second, self._text = second, time.strftime(form, time.localtime(second))
        return f"{self._text}{'.' if self._is_json else ','}{int((now_s - second) * 1e3):03d}"

    def write(
        self,
        method: str,
        path: str,
        polled: bool,
        status: int,
        seconds: float,
        received: int,
        sent: int,
        peer: str | None,
    ) -> None:
        """Write a line, at level debug where `polled`; `received` and `sent` are bytes."""
        if not (self.polled if polled else self.ordinary):
            return
        path = path[:_PATH_CHARS]
        if not path.isprintable():
            path = ascii(path)[1:-1]
        level = "debug" if polled else "info"
        milliseconds = round(seconds * 1e3, 2)
        if self._is_json:
            fields = {
                "time": self._time(), "level": level, "logger": _LOGGER,
                "message": f"{method} {path}", "status": status, "ms": milliseconds,
                "received": received, "sent": sent, "peer": peer, "bus": self._bus,
            }  # fmt: skip
            line = json.dumps(fields)
        else:
            line = (
                f"{self._time()} {level.upper()} {method} {path} status={status} "
                f"ms={milliseconds} received={received} sent={sent} peer={peer} bus={self._bus}"
            )
        try:
            sys.stderr.write(line + "\n")
        except OSError:
            # Whoever read the log has gone: as with any other line, the request is answered.
            self.ordinary = self.polled = False
