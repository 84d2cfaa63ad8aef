"""The daemon's log on stderr: one JSON object a line, or text for people."""

from __future__ import annotations

import json
import logging
from typing import Any, Literal

#: Attributes of every record; further attributes came from `extra`.
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    # Another library's record factory may add private attributes: Ray does on import.
    return {
        key: value
        for key, value in record.__dict__.items()
        if key not in _STANDARD and not key.startswith("_")
    }


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        extra = " ".join(f"{key}={value}" for key, value in _extra(record).items())
        return f"{line} {extra}" if extra else line


def set_up(form: Literal["json", "text"], level: str) -> None:
    """Write the records of the logger ``shmbus`` to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        _Json() if form == "json" else _Text("%(asctime)s %(levelname)s %(message)s")
    )
    logger = logging.getLogger("shmbus")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
