"""Structured logs: one line a record, with request id and key as fields of their own.

What a task works on is said once, by :func:`log_about`; all that is logged in it, and in the tasks and
threads that it starts, has those fields, so that no line about a job is without them.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",  # uvicorn's, the message once more for a terminal
}

_ABOUT: ContextVar[Mapping[str, str]] = ContextVar("about", default={})  # noqa: B039 - never changed


def log_about(**fields: str) -> None:
    """From now on what this task logs is about these, and what it was about before."""
    _ABOUT.set({**_ABOUT.get(), **fields})


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    own = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    return {**_ABOUT.get(), **own}  # where it is formatted is where it was logged


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        extras = " ".join(f"{name}={value}" for name, value in _extras(record).items())
        return f"{text} [{extras}]" if extras else text


def configure_logging(level: str, form: str) -> None:
    """Set up the root logger; only ``main()`` of a process calls this.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        form: ``json`` (one object a line, on standard error) or ``text``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "nats"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
