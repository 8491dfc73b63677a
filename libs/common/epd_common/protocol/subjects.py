"""Names on the bus: subjects, streams, consumers, and model names made safe for them."""

from __future__ import annotations

import functools
import re
from typing import Literal

ENCODE_STREAM = "EPD_ENCODE"
GENERATE_STREAM = "EPD_GENERATE"
DLQ_STREAM = "EPD_DLQ"
EXHAUSTED_STREAM = "EPD_EXHAUSTED"
WORKERS_BUCKET = "epd_workers"

LANES = ("l0", "l1", "l2", "l3", "l4")
ANY_PLACE = "any"
DECODE_PLACE = "decode"
"""Of jobs whose prompts are prefilled: all decode workers take them."""

Stage = Literal["encode", "generate"]

MAX_INBOX = 256
_RESERVED = ("$", "epd.")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_WORKER = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SUBJECT = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")

LONGEST_MODEL_TOKEN = 255 - len("generate-=place=") - 64
"""What a server takes for a consumer's name, less what :func:`place_consumer` puts around a model's."""

_SAFE = re.compile(rb"[A-Za-z0-9_-]")
_ESCAPE = re.compile(r"=([0-9A-F]{2})")


@functools.lru_cache(maxsize=1024)
def model_token(name: str) -> str:
    """A model's name as one subject token.

    Letters, digits, ``_`` and ``-`` stay; every other byte of the UTF-8 name becomes ``=XX`` (upper-case
    hex), which subjects, consumer names and KV keys all allow.
    """
    if not name:
        raise ValueError("a model name must not be empty")
    return "".join(
        chr(byte) if _SAFE.match(bytes([byte])) else f"={byte:02X}" for byte in name.encode()
    )


def model_name(token: str) -> str:
    """The inverse of :func:`model_token`."""
    raw = _ESCAPE.sub(lambda m: chr(int(m[1], 16)), token)
    return raw.encode("latin-1").decode()


def encode_subject(model: str, lane: str) -> str:
    return f"epd.v1.encode.{model_token(model)}.{lane}"


def generate_subject(model: str, lane: str, place: str = ANY_PLACE) -> str:
    return f"epd.v1.generate.{model_token(model)}.{lane}.{place}"


def lane_of(subject: str) -> str:
    """The lane that a job's subject names."""
    return subject.split(".")[4]


def place_of(subject: str) -> str:
    """The place that the subject of a generate job names."""
    return subject.split(".")[5]


def ready_subject(key: str) -> str:
    return f"epd.v1.ready.{key}"


def cancel_subject(request_id: str) -> str:
    return f"epd.v1.cancel.{request_id}"


def replay_subject(request_id: str) -> str:
    return f"epd.v1.replay.{request_id}"


def progress_subject(request_id: str) -> str:
    return f"epd.v1.progress.{request_id}"


def explain_subject(request_id: str) -> str:
    return f"epd.v1.explain.{request_id}"


def held_subject(worker: str) -> str:
    return f"epd.v1.held.{worker}"


def dlq_subject(stage: str) -> str:
    return f"epd.v1.dlq.{stage}"


def encode_consumer(model: str, lane: str) -> str:
    """The durable consumer that all encoders of a model share on one lane."""
    return f"encode-{model_token(model)}-{lane}"


def generate_consumer(model: str, lane: str, place: str = ANY_PLACE) -> str:
    """The durable consumer that PD workers of a model share on one lane; at ``decode``, decode workers."""
    return f"generate-{model_token(model)}-{lane}-{place}"


def place_consumer(model: str, worker: str) -> str:
    """The durable consumer of the jobs that are meant for one PD worker, of all lanes.

    Where an ``=`` begins no escape the model's token has ended, whatever names follow.
    """
    return f"generate-{model_token(model)}=place={worker}"


def inbox_prefix(role: str) -> str:
    """What the inboxes of a role's processes begin with, so that no other role need be let into them.

    Those of clients begin with NATS's own ``_INBOX``.
    """
    return f"_INBOX_{role}"


def worker_key(role: str, worker: str) -> str:
    """Key of a worker's record in the registry bucket."""
    return f"{role}.{worker}"


def is_inbox(subject: str) -> bool:
    """Whether answers may be sent there: a short subject, and none that the system itself uses.

    A subject that is longer than the server's control line would end the sender's connection for good.
    """
    if len(subject) > MAX_INBOX or subject.startswith(_RESERVED):
        return False
    return _SUBJECT.fullmatch(subject) is not None


def is_request_id(text: str) -> bool:
    """Whether this can be a request's id: 1 to 128 letters, digits, ``_`` or ``-``."""
    return _REQUEST_ID.fullmatch(text) is not None


def is_worker(text: str) -> bool:
    """Whether this can be a worker's id: 1 to 64 letters, digits, ``_`` or ``-``, and not a place's name."""
    return text not in (ANY_PLACE, DECODE_PLACE) and _WORKER.fullmatch(text) is not None
