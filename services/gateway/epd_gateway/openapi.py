"""The OpenAPI document of the gateway's own routes.

Bodies of requests go on to vLLM, which knows many more fields than the gateway reads; those that it reads are
described here, and others are allowed. What a field of vLLM's means stands in vLLM's own documentation.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from epd_common.errors import ERROR_TYPES
from epd_common.ingest.body import MAX_PARTS
from epd_common.ingest.parts import TEXT_FIELDS
from epd_common.ingest.processor_args import arguments_schema
from epd_gateway import page

Schema = dict[str, Any]

_FAILURES: dict[int, str] = {
    400: "The request can never work as it is; `param` names the field or the item's place.",
    401: "No API key, or one that is not known (only where keys are set).",
    404: "No such model, file, response or route.",
    408: "The body did not come in time.",
    409: "A request with this id is running already.",
    413: "A body, a picture or a count above its limit.",
    415: "Not the content type, or not the kind of media, that is taken.",
    429: "A queue or a share is full, or the tenant has its bytes in the media store.",
    499: "Somebody cancelled the request.",
    500: "An unexpected error.",
    502: "A stage gave up.",
    503: "No worker of the model is ready, or a broker is away.",
    504: "The deadline passed; `stage` says where.",
}
_RETRIED = (429, 503)
_BASE = (400, 401, 500)


def openapi_document() -> dict[str, Any]:
    """The document, the same at every call."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "epdflow gateway",
            "version": metadata.version("epdflow"),
            "description": "OpenAI's API in front of vLLM with the encoder apart. Fields that are not "
            "described here go on to vLLM.",
        },
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/chat/completions": {"post": _generate("ChatRequest", "Answer a chat.")},
            "/v1/completions": {"post": _generate("CompletionRequest", "Complete a text.")},
            "/v1/responses": {
                "post": _generate("ResponseRequest", "Answer in the form of the Responses API.")
            },
            "/v1/responses/{response_id}": {"get": _not_kept(), "delete": _not_kept()},
            "/v1/responses/{response_id}/cancel": {"post": _not_kept()},
            "/v1/responses/{response_id}/input_items": {"get": _not_kept()},
            "/v1/models": {"get": _models()},
            "/v1/models/{name}": {"get": _model()},
            "/v1/files": {"post": _upload()},
            "/v1/files/{file_id}": {"get": _file(), "delete": _delete()},
            "/v1/files/{file_id}/content": {"get": _content()},
            "/ui/api/live": {"get": _live()},
            "/ui/api/requests/{request_id}": {"get": _trail()},
            "/health": {"get": _health()},
            "/ready": {"get": _ready()},
            "/metrics": {"get": _metrics()},
            "/openapi.json": {"get": _document()},
            page.PAGE: {"get": _page()},
            f"{page.PAGE}/{{file}}": {"get": _page_file()},
        },
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: Schema, *required: str, **more: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def _json(schema: Schema, description: str) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _answers(good: Schema, *failures: int) -> Schema:
    """The responses of an operation: 200, and the failures that it can end with."""
    answers: Schema = {"200": good}
    for status in sorted(failures):
        assert status in ERROR_TYPES or status == 500
        answers[str(status)] = _json(_ref("Error"), _FAILURES[status])
        if status in _RETRIED:
            answers[str(status)]["headers"] = {
                "Retry-After": {"schema": {"type": "integer", "minimum": 1}}
            }
    return answers


def _generate(body: str, summary: str) -> Schema:
    return {
        "summary": summary,
        "parameters": [
            {
                "name": "x-epd-deadline-s",
                "in": "header",
                "description": "Seconds this request may take, where that is less than EPD_DEADLINE_S.",
                "schema": {"type": "number", "exclusiveMinimum": 0},
            },
            {
                "name": "x-epd-explain",
                "in": "header",
                "description": "`true`: an answer that is not streamed has a header x-epd-receipt, JSON that "
                "says how it came about.",
                "schema": {"type": "string"},
            },
            {
                "name": "traceparent",
                "in": "header",
                "description": "W3C trace context.",
                "schema": {
                    "type": "string",
                    "maxLength": 55,
                },
            },
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(body)}},
        },
        "responses": _answers(
            {
                "description": "vLLM's answer; with `stream` as server-sent events.",
                "headers": {
                    "x-request-id": {"schema": {"type": "string"}},
                    "x-epd-worker": {"schema": {"type": "string"}},
                    "x-epd-receipt": {"schema": {"type": "string"}},
                    "x-epd-items": {
                        "description": "What became of each distinct item: encoded, shared or reused.",
                        "schema": {"type": "string"},
                    },
                },
                "content": {
                    "application/json": {"schema": {"type": "object"}},
                    "text/event-stream": {"schema": {}},  # events, as in OpenAI's API
                },
            },
            *_BASE,
            *(404, 408, 409, 413, 415, 429, 499, 502, 503, 504),
        ),
    }


def _not_kept() -> Schema:
    return {
        "summary": "No answer is kept, so none is found.",
        "parameters": [_named("response_id")],
        "responses": {
            str(status): _json(_ref("Error"), _FAILURES[status]) for status in (*_BASE, 404)
        },
    }


def _models() -> Schema:
    listed = _object(
        {
            "object": {"const": "list"},
            "data": {"type": "array", "items": _ref("Model")},
        },
        "object",
        "data",
    )
    return {
        "summary": "The models that can be asked now.",
        "responses": _answers(_json(listed, "All of them."), *_BASE),
    }


def _named(name: str) -> Schema:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    }


def _model() -> Schema:
    return {
        "summary": "One model. Its name may have slashes.",
        "parameters": [_named("name")],
        "responses": _answers(_json(_ref("Model"), "It is there."), *_BASE, 404),
    }


def _upload() -> Schema:
    form = _object(
        {
            "purpose": {"const": "vision"},
            "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        },
        "purpose",
        "file",
    )
    return {
        "summary": "Keep a picture, and start its encode.",
        "requestBody": {
            "required": True,
            "content": {"multipart/form-data": {"schema": form}},
        },
        "responses": _answers(_json(_ref("File"), "It is kept."), *_BASE, 408, 413, 415, 429, 503),
    }


def _file() -> Schema:
    return {
        "summary": "What is known of an upload.",
        "parameters": [_named("file_id")],
        "responses": _answers(_json(_ref("File"), "It is there."), *_BASE, 404, 503),
    }


def _delete() -> Schema:
    deleted = _object(
        {"id": {"type": "string"}, "object": {"const": "file"}, "deleted": {"const": True}},
        "id",
        "object",
        "deleted",
    )
    return {
        "summary": "Forget an upload.",
        "parameters": [_named("file_id")],
        "responses": _answers(_json(deleted, "It is forgotten."), *_BASE, 404, 503),
    }


def _content() -> Schema:
    return {
        "summary": "The bytes of an upload.",
        "parameters": [_named("file_id")],
        "responses": _answers(
            {
                "description": "As they came.",
                "content": {"image/*": {"schema": {}}},
            },
            *_BASE,
            404,
            503,
        ),
    }


def _health() -> Schema:
    good = _object({"status": {"const": "ok"}}, "status")
    return {
        "summary": "Whether the gateway lives.",
        "security": [],
        "responses": _answers(_json(good, "It does."), 500),
    }


def _ready() -> Schema:
    good = _object(
        {
            "status": {"const": "ready"},
            "models": {"type": "array", "items": {"type": "string"}},
        },
        "status",
        "models",
    )
    return {
        "summary": "Whether requests would be answered.",
        "security": [],
        "responses": _answers(_json(good, "They would."), 500, 503),
    }


def _metrics() -> Schema:
    return {
        "summary": "Metrics in Prometheus's text format.",
        "security": [],
        "responses": _answers(
            {"description": "All.", "content": {"text/plain": {"schema": {"type": "string"}}}}, 500
        ),
    }


def _live() -> Schema:
    return {
        "summary": "What goes on: workers, queues, stores and the latest requests, as the page shows it.",
        "responses": _answers(_json({"type": "object"}, "As of now."), *_BASE),
    }


def _trail() -> Schema:
    return {
        "summary": "What became of one of the latest requests, stage by stage.",
        "parameters": [_named("request_id")],
        "responses": _answers(_json({"type": "object"}, "Its trail."), *_BASE, 404),
    }


def _document() -> Schema:
    return {
        "summary": "This document.",
        "responses": _answers(_json({"type": "object"}, "It."), *_BASE),
    }


def _page() -> Schema:
    return {
        "summary": "The web page.",
        "security": [],
        "responses": _answers(
            {"description": "It.", "content": {"text/html": {"schema": {"type": "string"}}}}, 500
        ),
    }


def _page_file() -> Schema:
    kinds = sorted({kind.partition(";")[0] for kind in page.FILES.values()})
    return {
        "summary": "A script, style or picture of the web page.",
        "security": [],
        "parameters": [
            {
                "name": "file",
                "in": "path",
                "required": True,
                "schema": {"enum": list(page.FILES)},
            }
        ],
        "responses": _answers(
            {"description": "As it is.", "content": {kind: {"schema": {}} for kind in kinds}},
            *(401, 404, 500),
        ),
    }


def _schemas() -> dict[str, Schema]:
    text: Schema = {"type": "string"}
    return {
        "ChatRequest": _object(
            {
                "model": {"type": "string", "minLength": 1},
                "messages": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": MAX_PARTS,
                    "items": _ref("Message"),
                },
                "stream": {"type": ["boolean", "null"]},
                "mm_processor_kwargs": _ref("ProcessorArguments"),
            },
            "model",
            "messages",
        ),
        "CompletionRequest": _object(
            {
                "model": {"type": "string", "minLength": 1},
                "prompt": {
                    "anyOf": [text, {"type": "array", "minItems": 1, "items": text}],
                },
                "stream": {"type": ["boolean", "null"]},
            },
            "model",
            "prompt",
        ),
        "ResponseRequest": _object(
            {
                "model": {"type": "string", "minLength": 1},
                "input": {
                    "anyOf": [
                        text,
                        {
                            "type": "array",
                            "minItems": 1,
                            "maxItems": MAX_PARTS,
                            "items": {"anyOf": [_ref("Message"), {"type": "object"}]},
                        },
                    ],
                },
                "instructions": {"type": ["string", "null"]},
                "max_output_tokens": {"type": ["integer", "null"], "minimum": 1},
                "stream": {"type": ["boolean", "null"]},
                "store": {
                    "description": "Taken, and without effect: no answer is kept.",
                    "type": ["boolean", "null"],
                },
                "background": {"enum": [False, None]},
                "previous_response_id": {"type": "null"},
                "conversation": {"type": "null"},
                "mm_processor_kwargs": _ref("ProcessorArguments"),
            },
            "model",
            "input",
        ),
        "Message": _object(
            {
                "role": text,
                "content": {
                    "anyOf": [
                        {"type": ["string", "null"]},
                        {"type": "array", "items": _ref("Part")},
                    ]
                },
            },
            "role",
        ),
        "Part": {
            "anyOf": [
                text,
                *(
                    _object({"type": {"const": kind}, name: text}, "type", name)
                    for kind, name in TEXT_FIELDS.items()
                ),
                *(
                    _object({"type": {"const": kind}, kind: _ref("Url")}, "type", kind)
                    for kind in ("image_url", "video_url", "audio_url")
                ),
                _object({"type": {"const": "input_image"}, "image_url": text}, "type", "image_url"),
                _object({"type": {"const": "input_image"}, "file_id": text}, "type", "file_id"),
                _object(
                    {
                        "type": {"const": "image_file"},
                        "image_file": _object({"file_id": text}, "file_id"),
                    },
                    "type",
                    "image_file",
                ),
                _object(
                    {
                        "type": {"const": "input_audio"},
                        "input_audio": _object({"data": text, "format": text}, "data"),
                    },
                    "type",
                    "input_audio",
                ),
            ],
        },
        "Url": {
            "description": "An https: URL or a data: URI.",
            "anyOf": [text, _object({"url": text}, "url")],
        },
        "ProcessorArguments": {
            "type": ["object", "null"],
            "properties": arguments_schema(),
            "additionalProperties": False,
        },
        "Model": _object(
            {
                "id": text,
                "object": {"const": "model"},
                "created": {"type": "integer"},
                "owned_by": text,
                "max_model_len": {"type": "integer"},
            },
            "id",
            "object",
            "created",
            "owned_by",
            "max_model_len",
        ),
        "File": _object(
            {
                "id": text,
                "object": {"const": "file"},
                "bytes": {"type": "integer", "minimum": 1},
                "created_at": {"type": "integer"},
                "filename": text,
                "purpose": {"const": "vision"},
                "status": {"const": "processed"},
            },
            "id",
            "object",
            "bytes",
            "created_at",
            "filename",
            "purpose",
            "status",
        ),
        "Error": _object(
            {
                "error": _object(
                    {
                        "message": {"type": "string", "minLength": 1},
                        "type": text,
                        "param": {"type": ["string", "null"]},
                        "code": {
                            "description": "A stable word; a number in errors of vLLM itself.",
                            "type": ["string", "integer", "null"],
                        },
                        "stage": text,
                        "key": text,
                    },
                    "message",
                    "type",
                    "param",
                    "code",
                )
            },
            "error",
        ),
    }
