"""Responses if the disk is full or read-only, too many files are open, or the database is damaged or unreachable."""

from __future__ import annotations

import errno
import logging

from fastapi import FastAPI, Request
from sqlalchemy.exc import DatabaseError, OperationalError
from starlette.responses import Response

from index.errors import RegraftError
from index.events import Event
from service.errors import DatabaseDamaged, StorageFull
from service.http.server.problems import database_error, failure_of, problem_of, request_id_of
from service.store.faults import is_damage, is_full, storage_full, storage_read_only

logger = logging.getLogger(__name__)

TOO_MANY = {errno.EMFILE, errno.ENFILE}


class TooManyFiles(RegraftError):
    """The service has too many open files: retry. It is unknown whether a requested change was made."""

    status = 503
    code = "too_many_files"


def install(app: FastAPI) -> None:
    """Turn these faults into problem responses; other errors of these classes are raised again."""
    app.add_exception_handler(OSError, _fault)
    app.add_exception_handler(DatabaseError, _fault)
    app.add_exception_handler(OperationalError, _fault)
    app.add_exception_handler(StorageFull, _fault)


async def _fault(request: Request, error: Exception) -> Response:
    full = error if isinstance(error, StorageFull) else storage_full(error) if is_full(error) else None
    if full is not None:
        request.app.state.runtime.space.note_full()
        return failure_of(full, request.scope)
    if is_damage(error):
        return failure_of(DatabaseDamaged(), request.scope)
    if isinstance(error, OSError) and error.errno in TOO_MANY:
        logger.error(Event("too_many_files"), exc_info=error)
        return problem_of(TooManyFiles(), request_id_of(request))
    if (forbidden := storage_read_only(error)) is not None:
        logger.error(Event("storage_read_only", reason=str(error).partition("\n")[0]))
        return problem_of(forbidden, request_id_of(request))
    if isinstance(error, OperationalError):
        return await database_error(request, error)
    raise error
