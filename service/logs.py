"""Logging of the service and its workers, with uvicorn and Alembic, as console lines or as JSON; see `configure`."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from typing import Literal

from index.errors import RegraftError
from index.events import CONTEXT, Event, fields_as_text

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

HANDLER = "regraft"
REPEAT_SECONDS = 60.0
"""How often a recurring error is logged."""


class ConsoleFormatter(logging.Formatter):
    """Time, level, logger and message, then the context fields, such as those of the request."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Everything but a traceback."""
        line = super().formatMessage(record)
        return line if isinstance(record.msg, Event) else line + fields_as_text(CONTEXT.get())


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, event, the event's fields, and a traceback as `exception`.

    The event of another library's line is its message.
    """

    def format(self, record: logging.LogRecord) -> str:
        event = record.msg if isinstance(record.msg, Event) else None
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            **(event.fields if event else CONTEXT.get()),
            "time": f"{moment}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": event.name if event else record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class RecurringErrors:
    """Logs errors of work that is retried every second or so: each kind at first, then at most once a minute."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        # Event and kind of error -> when it was logged.
        self._logged_at: dict[tuple[str, type], float] = {}

    def attempt(self, failed: Event, work: Callable[[], object]) -> bool:
        """Run `work`; returns whether it succeeded, and logs `failed` if not."""
        try:
            work()
        except Exception:
            self.log(failed)
            return False
        return True

    def log(self, event: Event) -> None:
        """Log the exception being handled unless its kind was logged within REPEAT_SECONDS.

        A RegraftError is logged by its message, others with a traceback.
        """
        error = sys.exception()
        if is_expected := isinstance(error, RegraftError):
            event = Event(event.name, **event.fields, reason=error.message)
        now, key = time.monotonic(), (str(event), type(error))
        self._logged_at = {key_: at for key_, at in self._logged_at.items() if now - at < REPEAT_SECONDS}
        if key not in self._logged_at:
            self._logged_at[key] = now
            self._logger.error(event, exc_info=not is_expected)


FORMATTERS: dict[LogFormat, type[logging.Formatter]] = {"console": ConsoleFormatter, "json": JsonFormatter}


def configure(log_format: LogFormat, level: LogLevel) -> None:
    """Write log lines of `level` and above to standard error; a repeated call replaces the handler."""
    handler = logging.StreamHandler()
    handler.set_name(HANDLER)
    handler.setFormatter(FORMATTERS[log_format]())
    root = logging.getLogger()
    for old in [existing for existing in root.handlers if existing.get_name() == HANDLER]:
        root.removeHandler(old)
    root.addHandler(handler)
    logging.captureWarnings(True)  # Python would write them past the log
    # Whoever sends images could fill the log: a TIFF of 24 kB has 2,000 fields of which Pillow warns. The sender
    # learns what makes an image unreadable.
    warnings.filterwarnings("ignore", module="PIL")
    root.setLevel(level.upper())
    # These log each request to a store or service, each plugin of Alembic, and each missing build of FAISS.
    for chatty in ("httpx", "alembic.runtime.plugins", "faiss.loader"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
