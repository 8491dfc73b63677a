"""The protocol as an AsyncAPI 3.0 document, built from the very messages and subjects that the code uses.

``python -m epd_common.protocol.asyncapi`` writes ``docs/asyncapi.json``; with ``--check`` it only says
whether that file is up to date.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec

from epd_common.protocol import subjects
from epd_common.protocol.base import VERSION, Message
from epd_common.protocol.codec import MESSAGES
from epd_common.protocol.control import (
    Cancel,
    Cancelled,
    DeadLetter,
    Progress,
    ReplayRequest,
    ResumeRequest,
)
from epd_common.protocol.events import EmbeddingEvent
from epd_common.protocol.holdings import Held
from epd_common.protocol.jobs import EncodeJob, GenerateJob
from epd_common.protocol.replies import ReplyData, ReplyEnd, ReplyError, ReplyHead
from epd_common.protocol.workers import WorkerRecord

JsonObject = dict[str, Any]

DEFAULT_FILE = Path("docs/asyncapi.json")
CONTENT_TYPE = "application/msgpack"
_REPLIES: tuple[type[Message], ...] = (ReplyHead, ReplyData, ReplyEnd, ReplyError)
_REF = "#/components/schemas/{name}"

_PARAMETERS: dict[str, JsonObject] = {
    "model": {
        "description": "The model's name as one token: letters, digits, `_` and `-` stay, every other byte "
        "of its UTF-8 form becomes `=XX` (upper-case hex)."
    },
    "lane": {
        "enum": list(subjects.LANES),
        "description": "Urgency, `l0` first: by the work that stands before the job in its own request.",
    },
    "place": {
        "default": subjects.ANY_PLACE,
        "description": "Which worker: any, or the id of one that should do the job if it can.",
    },
    "key": {"description": "Key of an embedding, 64 lower-case hex characters."},
    "request": {"description": "`request_id` of a generate job: one subject token."},
    "inbox": {"description": "The subject that the generate job names as its `inbox`."},
    "stage": {"enum": ["encode", "generate"], "description": "The stage that gave the job up."},
    "role": {"description": "`gateway`, `encoder`, `pd` or `client`."},
    "worker": {"description": "Id of a worker: letters, digits, `_` and `-`, at most 64."},
}


class _Channel(msgspec.Struct, frozen=True):
    """A subject, and who sends what there. ``sends`` and ``receives`` are seen from epdflow's side."""

    address: str
    title: str
    description: str
    messages: tuple[type[Message], ...]
    sends: bool
    receives: bool
    nats: JsonObject


def _stream(name: str, consumer: Callable[..., str] | None = None) -> JsonObject:
    """A JetStream stream, and the durable consumer that workers pull from."""
    found: JsonObject = {"kind": "jetstream", "stream": name, "messageIdHeader": "Nats-Msg-Id"}
    if consumer is not None:
        found |= {"retention": "workqueue", "consumer": consumer("MODEL", "LANE")}
    return found


def _with_parameters(value: Any) -> Any:
    """The names of parameters in braces; the subject functions would escape braces."""
    text = json.dumps(value)
    for name in _PARAMETERS:
        text = text.replace(name.upper(), "{" + name + "}")
    return json.loads(text)


_CORE: JsonObject = {"kind": "core"}

_CHANNELS: dict[str, _Channel] = {
    "encodeJobs": _Channel(
        subjects.encode_subject("MODEL", "LANE"),
        "Encode jobs",
        "One job an item that nobody has encoded or encodes now.",
        (EncodeJob,),
        True,
        True,
        _stream(subjects.ENCODE_STREAM, subjects.encode_consumer),
    ),
    "generateJobs": _Channel(
        subjects.generate_subject("MODEL", "LANE", "PLACE"),
        "Generate jobs",
        "One job a request. Whoever publishes one gets its answer at the inbox that it names.",
        (GenerateJob,),
        False,
        True,
        _stream(subjects.GENERATE_STREAM, subjects.generate_consumer),
    ),
    "ready": _Channel(
        subjects.ready_subject("KEY"),
        "Embedding events",
        "An encoder tells everybody what became of one embedding.",
        (EmbeddingEvent,),
        True,
        True,
        _CORE,
    ),
    "replies": _Channel(
        "INBOX",
        "Reply frames",
        "`head`, any number of `data`, then `end`; or `error` at any point, which ends the reply. And "
        "`resume`, from a worker that goes on with the answer of another.",
        (*_REPLIES, ResumeRequest),
        True,
        False,
        _CORE,
    ),
    "cancel": _Channel(
        subjects.cancel_subject("REQUEST"),
        "Cancels",
        "The requester wants no answer any more.",
        (Cancel,),
        False,
        True,
        _CORE,
    ),
    "cancelAnswers": _Channel(
        "INBOX",
        "Answers to cancels",
        "Where a cancel names a reply subject: who had the request and lets go of it.",
        (Cancelled,),
        True,
        False,
        _CORE,
    ),
    "replay": _Channel(
        subjects.replay_subject("REQUEST"),
        "Replays",
        "The requester asks for frames that were lost.",
        (ReplayRequest,),
        False,
        True,
        _CORE,
    ),
    "progress": _Channel(
        subjects.progress_subject("REQUEST"),
        "Progress",
        "The requester says what it has of an answer, when a worker asks by `resume`.",
        (Progress,),
        False,
        True,
        _CORE,
    ),
    "held": _Channel(
        subjects.held_subject("WORKER"),
        "Prefix caches",
        "A PD worker says which beginnings of prompts its cache holds, at least every second.",
        (Held,),
        True,
        True,
        _CORE,
    ),
    "deadLetters": _Channel(
        subjects.dlq_subject("STAGE"),
        "Dead letters",
        "Jobs that were given up, with the reason.",
        (DeadLetter,),
        True,
        False,
        _stream(subjects.DLQ_STREAM) | {"retention": "limits"},
    ),
    "workers": _Channel(
        f"$KV.{subjects.WORKERS_BUCKET}.{subjects.worker_key('ROLE', 'WORKER')}",
        "Worker records",
        "The KV bucket of workers: one value a worker, written again at every heartbeat.",
        (WorkerRecord,),
        True,
        True,
        {"kind": "kv", "bucket": subjects.WORKERS_BUCKET, "history": 1}
        | {"key": subjects.worker_key("ROLE", "WORKER")},
    ),
}

_HEALTH: JsonObject = {
    "type": "object",
    "description": "The worker's state.",
    "properties": {
        "ok": {"type": "boolean", "description": "Whether it takes work."},
        "state": {"type": "string"},
    },
    "required": ["ok"],
}


_EXPLAIN: JsonObject = {
    "type": "object",
    "description": "What became of a request: docs/operations.md says what the fields mean.",
    "properties": {"request_id": {"type": "string"}, "state": {"type": "string"}},
    "required": ["request_id", "state"],
}


def build() -> JsonObject:
    """The whole document."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "epdflow",
            "version": f"{VERSION}.0.0",
            "description": "Encoder, prefill and decode of multimodal models apart, joined by NATS. "
            "Messages are MessagePack maps with `t` (which message) and `v` (schema version). Unknown "
            "fields are ignored. docs/protocol.md says more.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": CONTENT_TYPE,
        "channels": {name: _channel(channel) for name, channel in _CHANNELS.items()}
        | {"health": _health_channel(), "explain": _explain_channel()},
        "operations": _operations(),
        "components": {
            "messages": {_tag(message): _message(message) for message in MESSAGES}
            | {"healthRequest": _request("Health"), "health": _answer("Health")}
            | {"explainRequest": _request("Explain"), "explain": _answer("Explain")},
            "schemas": _schemas() | {"Health": _HEALTH, "Explain": _EXPLAIN},
        },
    }


def render() -> str:
    """The document as it stands in the file."""
    return json.dumps(build(), indent=2, ensure_ascii=False) + "\n"


def _tag(message: type[Message]) -> str:
    return str(message.__struct_config__.tag)


def _channel(channel: _Channel) -> JsonObject:
    found = {
        "address": channel.address,
        "title": channel.title,
        "description": channel.description,
        "messages": {
            _tag(message): {"$ref": f"#/components/messages/{_tag(message)}"}
            for message in channel.messages
        },
        "x-nats": channel.nats,
    }
    return _parametrised(found)


def _parametrised(channel: JsonObject) -> JsonObject:
    used = {name: text for name, text in _PARAMETERS.items() if name.upper() in channel["address"]}
    return cast(
        JsonObject,
        channel
        | {"address": _with_parameters(channel["address"]), "parameters": used}
        | {"x-nats": _with_parameters(channel["x-nats"])},
    )


def _health_channel() -> JsonObject:
    return _parametrised(
        {
            "address": "epd.v1.health.WORKER",
            "title": "Health",
            "description": "The endpoint of the NATS micro service `epd-{role}`: a request with any body "
            "is answered with JSON. The service also answers `$SRV.PING`, `$SRV.INFO`, `$SRV.STATS`.",
            "messages": {
                "healthRequest": {"$ref": "#/components/messages/healthRequest"},
                "health": {"$ref": "#/components/messages/health"},
            },
            "x-nats": {
                "kind": "micro",
                "service": "epd-ROLE",
                "endpoint": "health",
                "monitoring": ["$SRV.PING", "$SRV.INFO", "$SRV.STATS"],
            },
        }
    )


def _explain_channel() -> JsonObject:
    return _parametrised(
        {
            "address": subjects.explain_subject("REQUEST"),
            "title": "Explanations",
            "description": "The gateway that had the request, and still remembers it, answers a request with "
            "any body with JSON; others say nothing.",
            "messages": {
                "explainRequest": {"$ref": "#/components/messages/explainRequest"},
                "explain": {"$ref": "#/components/messages/explain"},
            },
            "x-nats": _CORE,
        }
    )


def _operations() -> JsonObject:
    found: JsonObject = {}
    for name, channel in _CHANNELS.items():
        for action, does in (("send", channel.sends), ("receive", channel.receives)):
            if does:
                found[f"{action}{name[0].upper()}{name[1:]}"] = _operation(
                    action, name, [_tag(message) for message in channel.messages]
                )
    found["receiveGenerateJobs"]["reply"] = {
        "address": {"location": "$message.payload#/inbox"},
        "channel": {"$ref": "#/channels/replies"},
    }
    found["receiveCancel"]["reply"] = {
        "address": {"location": "$message.header#/reply"},
        "channel": {"$ref": "#/channels/cancelAnswers"},
    }
    for name in ("health", "explain"):
        found[f"answer{name.title()}"] = _operation("receive", name, [f"{name}Request"]) | {
            "reply": {
                "channel": {"$ref": f"#/channels/{name}"},
                "messages": [{"$ref": f"#/channels/{name}/messages/{name}"}],
            }
        }
    return found


def _operation(action: str, channel: str, messages: list[str]) -> JsonObject:
    return {
        "action": action,
        "channel": {"$ref": f"#/channels/{channel}"},
        "messages": [{"$ref": f"#/channels/{channel}/messages/{name}"} for name in messages],
    }


def _message(message: type[Message]) -> JsonObject:
    return {
        "name": _tag(message),
        "title": message.__name__,
        "summary": (inspect.getdoc(message) or "").partition("\n")[0],
        "contentType": CONTENT_TYPE,
        "payload": {"$ref": _REF.format(name=message.__name__)},
    }


def _request(title: str) -> JsonObject:
    return {"name": f"{title.lower()}Request", "title": f"{title} request", "payload": {}}


def _answer(title: str) -> JsonObject:
    return {
        "name": title.lower(),
        "title": title,
        "contentType": "application/json",
        "payload": {"$ref": _REF.format(name=title)},
    }


def _schemas() -> JsonObject:
    _, schemas = msgspec.json.schema_components(MESSAGES, ref_template=_REF)
    for message in MESSAGES:
        schema = schemas[message.__name__]
        schema["properties"]["v"] = {"const": VERSION, "description": "Schema version."}
        schema["required"] = ["t", "v", *(n for n in schema["required"] if n not in ("t", "v"))]
    return cast(JsonObject, _binary(schemas))


def _binary(schema: Any) -> Any:
    """msgspec describes bytes as JSON would carry them, in base64; MessagePack has a type for them."""
    if isinstance(schema, dict):
        if schema.get("contentEncoding") == "base64":
            rest = {name: value for name, value in schema.items() if name != "contentEncoding"}
            return rest | {"format": "binary", "x-msgpack": "bin"}
        return {name: _binary(value) for name, value in schema.items()}
    if isinstance(schema, list):
        return [_binary(value) for value in schema]
    return schema


def main(arguments: list[str] | None = None) -> int:
    """Write the file, or with ``--check`` compare it. 1 if it is not up to date."""
    parser = argparse.ArgumentParser(prog="python -m epd_common.protocol.asyncapi")
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    parser.add_argument("file", nargs="?", type=Path, default=DEFAULT_FILE)
    options = parser.parse_args(arguments)
    file: Path = options.file
    text = render()
    if not options.check:
        file.write_text(text)
        return 0
    if file.exists() and file.read_text() == text:
        return 0
    print(
        f"{file} is not up to date; write it with: python -m {__spec__.name} {file}",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
