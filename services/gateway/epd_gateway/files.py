"""OpenAI's files API for pictures: upload early, and the encode starts at once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException

from epd_common.errors import (
    BadRequestError,
    EpdError,
    NotFoundError,
    TooLargeError,
    UnsupportedMediaError,
)
from epd_common.protocol import Item, Media
from epd_common.protocol.keys import embedding_key
from epd_common.store import StoredFile, UploadedFile
from epd_gateway.auth import Caller, caller_of
from epd_gateway.bodies import arriving
from epd_gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from epd_gateway.app import Edge

logger = logging.getLogger(__name__)

PURPOSE = "vision"
_FORM_OVERHEAD_BYTES = 64 * 1024
_MAX_FIELD_BYTES = 1024
_MAX_NAME = 255


def add_file_routes(app: FastAPI, edge: Edge) -> None:
    """Add ``/v1/files``. A tenant's files are its own, whatever it shares of the cache."""

    @app.post("/v1/files")
    async def upload(request: Request) -> Any:
        caller = caller_of(request)
        data, filename, declared = await _read_form(request, edge.settings)
        stored = await edge.ingest.admit(data, declared=declared, place="file", owner=caller.tenant)
        uploaded = await edge.media.add_file(
            stored, filename=filename, purpose=PURPOSE, scope=caller.tenant
        )
        await _encode_early(edge, stored, caller)
        return _shown(uploaded)

    @app.get("/v1/files/{file_id}")
    async def show(request: Request, file_id: str) -> Any:
        return _shown(await _find(edge, file_id, caller_of(request)))

    @app.get("/v1/files/{file_id}/content")
    async def content(request: Request, file_id: str) -> Response:
        found = await _find(edge, file_id, caller_of(request))
        data = await edge.media.get(found.file.ref)
        return Response(data or b"", media_type=found.file.content_type)

    @app.delete("/v1/files/{file_id}")
    async def delete(request: Request, file_id: str) -> Any:
        if not await edge.media.delete_file(file_id, caller_of(request).tenant):
            raise _unknown(file_id)
        return {"id": file_id, "object": "file", "deleted": True}


async def _read_form(request: Request, settings: GatewaySettings) -> tuple[bytes, str, str]:
    """The upload's bytes, name and declared type."""
    max_bytes = settings.max_media_bytes
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise UnsupportedMediaError(
            "an upload's content type must be multipart/form-data", code="unsupported_content_type"
        )
    claimed = request.headers.get("content-length", "")
    if not claimed.isdigit():
        raise BadRequestError("an upload needs a content-length", code="length_required")
    if int(claimed) > max_bytes + _FORM_OVERHEAD_BYTES:
        raise TooLargeError(
            f"the file has more than {max_bytes} bytes (EPD_MAX_MEDIA_BYTES)",
            code="media_too_large",
            param="file",
        )
    try:
        async with (
            arriving(settings.body_timeout_s),
            request.form(max_files=1, max_fields=8, max_part_size=_MAX_FIELD_BYTES) as form,
        ):
            purpose = form.get("purpose")
            file = form.get("file")
            if purpose != PURPOSE:
                raise BadRequestError(
                    f"the field 'purpose' must be {PURPOSE!r}, not {purpose!r}", param="purpose"
                )
            if not isinstance(file, UploadFile):
                raise BadRequestError("the field 'file' must be a file", param="file")
            name = file.filename or ""
            if len(name) > _MAX_NAME:
                raise BadRequestError(
                    f"the file's name has more than {_MAX_NAME} characters", param="file"
                )
            return await file.read(), name, file.content_type or ""
    except MultiPartException as error:
        raise BadRequestError(f"the form cannot be read: {error.message}") from error


async def _encode_early(edge: Edge, stored: StoredFile, caller: Caller) -> None:
    """Start the encode for every model that has workers; that it cannot start is no error of the upload."""
    for model in edge.registry.models():
        try:
            worker = edge.requester.worker_for({"model": model})
            edge.requester.require_encoder(worker)
            item = Item(
                media=Media(ref=stored.ref, content_type=stored.content_type),
                key=embedding_key(
                    media_digest=stored.digest,
                    fingerprint=worker.fingerprint,
                    scope=caller.scope,
                ),
                digest=stored.digest,
                width=stored.width,
                height=stored.height,
            )
            await edge.requester.encode_early(item, worker, scope=caller.scope)
        except EpdError as error:
            logger.warning(
                "no early encode for %s: %s", model, error, extra={"digest": stored.digest}
            )


async def _find(edge: Edge, file_id: str, caller: Caller) -> UploadedFile:
    found = await edge.media.uploaded(file_id, caller.tenant)
    if found is None:
        raise _unknown(file_id)
    return found


def _unknown(file_id: str) -> NotFoundError:
    return NotFoundError(
        f"there is no file {file_id[:100]!r}", code="file_not_found", param="file_id"
    )


def _shown(uploaded: UploadedFile) -> dict[str, Any]:
    return {
        "id": uploaded.file_id,
        "object": "file",
        "bytes": uploaded.file.bytes,
        "created_at": uploaded.created_at,
        "filename": uploaded.filename,
        "purpose": uploaded.purpose,
        "status": "processed",
    }
