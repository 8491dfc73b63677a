"""The messages, read and written by a MessagePack library that knows nothing of epdflow."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import msgspec
import pytest

from epd_common.protocol import (
    Cancel,
    Cancelled,
    DeadLetter,
    EmbeddingEvent,
    EncodeJob,
    GenerateJob,
    Handover,
    Held,
    Item,
    ItemReceipt,
    Locator,
    Media,
    Progress,
    ProtocolError,
    Receipt,
    ReplayRequest,
    ReplyData,
    ReplyEnd,
    ReplyError,
    ReplyHead,
    ResumeRequest,
    WorkerRecord,
    decode,
    decode_reply,
    encode,
    subjects,
)
from epd_common.protocol.base import VERSION, Message
from epd_common.protocol.codec import MESSAGES
from epd_common.protocol.keys import digest, embedding_key, is_key
from epd_common.protocol.lanes import encode_lane, generate_lane

KEY = "0a" * 32
RECEIPT = Receipt(
    worker="w",
    node="n",
    attempt=2,
    queued_s=0.5,
    prepared_s=0.25,
    entered_s=0.5,
    first_s=1.0,
    ended_s=2.0,
    prompt_tokens=9,
    resumed_tokens=1,
    restarts=1,
    items=[ItemReceipt(key=KEY, encoder="e", rescue="local", ready_s=0.5, store="arena", rows=4)],
    loaded_tokens=8,
    prefill=Receipt(worker="p", node="n", attempt=1, queued_s=0.25),
)
FULL: dict[type[Message], Message] = {
    type(message): message
    for message in (
        EncodeJob(
            key=KEY,
            epoch=1_753_000_000_123,
            model="org/Model-é",
            fingerprint="f" * 64,
            modality="video",
            media=Media(inline=b"\x00\xff\x80", content_type="image/png"),
            processor_args={"max_pixels": 2**53, "nested": {"a": [1.5, None, True, "ü"]}},
            scope="tenant-1",
            deadline=1_753_000_000.25,
            request_id="r1",
            traceparent="00-aa-bb-01",
        ),
        GenerateJob(
            request_id="r1",
            model="m",
            route="/v1/completions",
            body=b'{"a": "\xc3\xa9"}',
            body_ref="ref",
            items=[
                Item(media=Media(inline=b"")),
                Item(
                    modality="audio",
                    media=Media(ref="d"),
                    key=KEY,
                    digest="d",
                    epoch=7,
                    width=3,
                    height=4,
                    processor_args={"x": 1},
                ),
            ],
            inbox="_INBOX.a.b",
            deadline=2.5,
            priority=-3,
            scope="tenant",
            traceparent="tp",
            requester="gateway.g",
            handover=Handover(
                worker="p",
                attempt=1,
                lease_s=30.0,
                params={"remote_block_ids": [[1, 2]]},
                metadata=[{"image_grid_thw": [1, 8, 8]}],
                receipt=RECEIPT,
            ),
        ),
        EmbeddingEvent(
            key=KEY,
            epoch=9,
            state="failed",
            fingerprint="f",
            metadata={"image_grid_thw": [1, 8, 8]},
            rows=16,
            width=3584,
            dtype="bfloat16",
            bytes=16 * 3584 * 2,
            checksum="c" * 32,
            locators=[Locator(store="arena", node="n1"), Locator(store="redis")],
            encoder="e1",
            attempt=2,
            queue_s=0.5,
            media_s=0.125,
            encode_s=0.25,
            publish_s=0.0625,
            status=400,
            code="cannot_encode",
            reason="why",
        ),
        ReplyHead(request_id="r", attempt=1, seq=0, status=200, content_type="a/b", worker="w"),
        ReplyData(
            request_id="r",
            attempt=1,
            seq=1,
            data=bytes(range(256)) * 300,
            tokens=[1, 151_000],
            finish="stop",
        ),
        ReplyEnd(request_id="r", attempt=1, seq=2, receipt=RECEIPT),
        ReplyError(
            request_id="r",
            attempt=3,
            seq=0,
            status=504,
            code="deadline_exceeded",
            message="late",
            stage="encode",
            key=KEY,
            param="items[0]",
            retry_after_s=1.5,
            receipt=RECEIPT,
        ),
        Cancel(request_id="r", reason="gone"),
        Cancelled(request_id="r", role="pd", worker="w"),
        ReplayRequest(request_id="r", attempt=1, seq=5),
        ResumeRequest(request_id="r", attempt=2),
        Progress(request_id="r", attempt=2, seq=3, tokens=[[], [7, 8]], finish="length", last=b"x"),
        Held(worker="w", epoch=5, seq=7, whole=True, keys=["a" * 16], gone=["b" * 16]),
        DeadLetter(
            stage="encode",
            subject="epd.v1.encode.m.l0",
            reason="no",
            code="c",
            worker="w",
            attempts=5,
            at=1.5,
            payload=b"\xc1",
        ),
        WorkerRecord(
            role="encoder",
            worker="w",
            node="n",
            state="draining",
            beat=12,
            ttl_s=1.5,
            model="m",
            fingerprint="f",
            modalities=["image"],
            encodes="rescue",
            pd_role="decode",
            slots=8,
            busy=2,
            arena_used_bytes=5,
            arena_quota_bytes=9,
            pid=99,
            phase="p",
            error="e",
            max_model_len=2048,
            special_tokens=["<|x|>"],
            max_item_rows=1024,
            special_token_ids=[7],
            versions={"vllm": "0.32"},
        ),
    )
}

# The least that a client of another language has to send.
SMALLEST: dict[str, dict[str, Any]] = {
    "encode": {"key": KEY, "epoch": 1, "model": "m", "fingerprint": "f", "media": {"ref": "d"}},
    "generate": {"request_id": "r", "model": "m"},
    "ready": {"key": KEY, "epoch": 1, "state": "ready"},
    "head": {"request_id": "r", "attempt": 1, "seq": 0, "status": 200},
    "data": {"request_id": "r", "attempt": 1, "seq": 1, "data": b"x"},
    "end": {"request_id": "r", "attempt": 1, "seq": 2},
    "error": {"request_id": "r", "attempt": 1, "seq": 0, "status": 500, "code": "c"}
    | {"message": "m"},
    "cancel": {"request_id": "r"},
    "cancelled": {"request_id": "r", "role": "pd", "worker": "w"},
    "replay": {"request_id": "r", "attempt": 1, "seq": 0},
    "resume": {"request_id": "r", "attempt": 2},
    "progress": {"request_id": "r", "attempt": 2},
    "held": {"worker": "w", "epoch": 5, "seq": 0},
    "dead": {"stage": "encode", "subject": "s", "reason": "r", "code": "c", "worker": "w"}
    | {"attempts": 1, "at": 1.0, "payload": b""},
    "worker": {"role": "pd", "worker": "w", "node": "n", "state": "ready", "beat": 0},
}


def tag(message: type[Message]) -> str:
    return str(message.__struct_config__.tag)


BY_TAG = {tag(message): message for message in MESSAGES}
each_message = pytest.mark.parametrize("message", MESSAGES, ids=tag)
each_tag = pytest.mark.parametrize("name", BY_TAG)


def packed(name: str, **changes: Any) -> bytes:
    """The smallest message of that name, by plain msgpack; a field changed to None is left out."""
    fields = {"t": name, "v": 1} | SMALLEST[name] | changes
    return msgpack.packb({k: v for k, v in fields.items() if v is not None})


def test_samples_cover_every_message_and_set_every_field() -> None:
    assert set(FULL) == set(MESSAGES)
    assert set(SMALLEST) == set(BY_TAG)
    assert len(BY_TAG) == len(MESSAGES), "two messages with one tag"
    for message in FULL.values():
        for field in msgspec.structs.fields(message):
            default = field.default
            if field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            if field.name != "v":
                assert getattr(message, field.name) != default, f"{message!r} leaves {field.name}"


@each_message
def test_round_trip(message: type[Message]) -> None:
    sample = FULL[message]
    assert decode(encode(sample), message) == sample


@each_message
def test_plain_msgpack_reads_every_field(message: type[Message]) -> None:
    sample = FULL[message]
    plain = msgpack.unpackb(encode(sample))
    expected = msgspec.to_builtins(sample, builtin_types=(bytes,))
    assert plain == expected
    assert set(plain) == {"t", *(field.name for field in msgspec.structs.fields(message))}
    assert plain["t"] == tag(message)
    assert plain["v"] == VERSION == 1


@each_tag
def test_smallest_message_by_plain_msgpack(name: str) -> None:
    message = decode(packed(name), BY_TAG[name])
    assert tag(type(message)) == name
    for field, value in SMALLEST[name].items():
        found = getattr(message, field)
        assert found == (Media(**value) if field == "media" else value)


@each_tag
def test_unknown_fields_are_ignored(name: str) -> None:
    plain = decode(packed(name), BY_TAG[name])
    newer = packed(name, a_new_field={"deep": [b"\xff", None, 2**60]}, another=1.5)
    assert decode(newer, BY_TAG[name]) == plain


def test_unknown_fields_of_inner_maps_are_ignored() -> None:
    items = [{"media": {"inline": b"x", "new": 1}, "new": []}]
    job = decode(packed("generate", items=items), GenerateJob)
    assert job.items == [Item(media=Media(inline=b"x"))]


@each_tag
@pytest.mark.parametrize("version", [0, 2, 99])
def test_another_version_is_refused(name: str, version: int) -> None:
    with pytest.raises(ProtocolError, match=f"'v' = {version} is not supported"):
        decode(packed(name, v=version), BY_TAG[name])


@each_tag
def test_another_version_is_told_before_its_fields(name: str) -> None:
    """A later version may have other fields; the reader should hear of the version, not of those."""
    with pytest.raises(ProtocolError, match="'v' = 2 is not supported"):
        decode(msgpack.packb({"t": name, "v": 2, "request_id": 5, "key": 5}), BY_TAG[name])


@each_tag
def test_another_message_is_refused(name: str) -> None:
    other = "cancel" if name != "cancel" else "end"
    with pytest.raises(ProtocolError, match=f"expected message '{name}', got 't' = '{other}'"):
        decode(packed(other), BY_TAG[name])


@each_tag
def test_every_truncation_is_refused(name: str) -> None:
    whole = encode(FULL[BY_TAG[name]])
    for length in {*range(min(len(whole), 300)), len(whole) - 1}:
        with pytest.raises(ProtocolError):
            decode(whole[:length], BY_TAG[name])
    with pytest.raises(ProtocolError):
        decode(whole + b"\x00", BY_TAG[name])


@each_tag
def test_a_missing_field_is_named(name: str) -> None:
    for field in SMALLEST[name]:
        with pytest.raises(ProtocolError, match=f"'{name}'.*`{field}`"):
            decode(packed(name, **{field: None}), BY_TAG[name])


@each_message
def test_a_wrong_type_is_named(message: type[Message]) -> None:
    good = msgpack.unpackb(encode(FULL[message]))
    for field in msgspec.structs.fields(message):
        wrong: Any = "text" if isinstance(good[field.name], list) else []
        bad = msgpack.packb(good | {field.name: wrong})
        with pytest.raises(ProtocolError, match=rf"\$\.{field.name}\b"):
            decode(bad, message)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"items": [{"media": {"inline": "text"}}]}, r"\$\.items\[0\]\.media\.inline"),
        ({"items": [{"media": {"ref": 1}}]}, r"\$\.items\[0\]\.media\.ref"),
        ({"items": [{}]}, r"`media`.*\$\.items"),
        ({"items": [{"media": {}, "modality": "smell"}]}, r"modality"),
        ({"items": [{"media": {}, "processor_args": {1: 2}}]}, r"processor_args"),
        ({"body": "text"}, r"\$\.body"),
        ({"deadline": "soon"}, r"\$\.deadline"),
    ],
)
def test_a_fault_within_a_generate_job_is_named(changes: dict[str, Any], place: str) -> None:
    with pytest.raises(ProtocolError, match=place):
        decode(packed("generate", **changes), GenerateJob)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"not msgpack at all",
        msgpack.packb([1, 2]),
        msgpack.packb("t"),
        msgpack.packb(None),
        msgpack.packb({"t": 5, "v": 1}),
        msgpack.packb({"t": "cancel", "v": "1", "request_id": "r"}),
        msgpack.packb({"v": 1}),
        b"\x83\xa1t\xa6cancel\xa1v\x01\xaarequest_id\xa1\xff",  # not UTF-8
        b"\x82\xa1t\xa6cancel\xa1z" + b"\x91" * 100_000 + b"\x01",  # nested too deep
        b"\xdf\xff\xff\xff\xff",  # a map of four billion entries
    ],
    ids=range(12),
)
def test_anything_else_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(data, Cancel)
    assert caught.value.status == 400
    assert caught.value.code == "malformed_message"


def test_random_bytes_never_raise_anything_else() -> None:
    dice = random.Random(1)
    samples = [encode(message) for message in FULL.values()]
    for _ in range(3000):
        data = bytearray(dice.choice(samples)[:400])
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        for message in (GenerateJob, EncodeJob, EmbeddingEvent, WorkerRecord):
            try:
                decode(bytes(data), message)
            except ProtocolError:
                pass


def test_decode_reply_takes_frames_and_nothing_else() -> None:
    for message in (ReplyHead, ReplyData, ReplyEnd, ReplyError):
        assert decode_reply(encode(FULL[message])) == FULL[message]
    with pytest.raises(ProtocolError, match="expected message 'head' or 'data'"):
        decode_reply(encode(FULL[Cancel]))


# -- names ---------------------------------------------------------------------------------------

TOKENS = [
    ("qwen2-vl", "qwen2-vl"),
    ("Qwen/Qwen2.5-VL-7B", "Qwen=2FQwen2=2E5-VL-7B"),
    ("a=b c", "a=3Db=20c"),
    ("*", "=2A"),
    (">", "=3E"),
    ("模", "=E6=A8=A1"),
    ("=41", "=3D41"),
    ("a\x00\n", "a=00=0A"),
]


@pytest.mark.parametrize(("name", "token"), TOKENS)
def test_model_token(name: str, token: str) -> None:
    assert subjects.model_token(name) == token
    assert subjects.model_name(token) == name


def test_random_model_names_are_reversible_and_safe() -> None:
    dice = random.Random(2)
    alphabet = "abZ09_-=. */>\\:\t\x00é模🙂%"
    seen: dict[str, str] = {}
    for _ in range(2000):
        name = "".join(dice.choices(alphabet, k=dice.randint(1, 12)))
        token = subjects.model_token(name)
        assert subjects.model_name(token) == name
        assert set(token) <= set(map(chr, range(33, 127))) - set(".*>/\\:%"), token
        assert seen.setdefault(token, name) == name, "two names with one token"


def test_an_empty_model_name_is_no_token() -> None:
    with pytest.raises(ValueError, match="empty"):
        subjects.model_token("")


def test_subjects() -> None:
    assert subjects.encode_subject("o/m", "l1") == "epd.v1.encode.o=2Fm.l1"
    assert subjects.generate_subject("o/m", "l0") == "epd.v1.generate.o=2Fm.l0.any"
    assert subjects.generate_subject("o/m", "l0", "w1") == "epd.v1.generate.o=2Fm.l0.w1"
    assert subjects.ready_subject(KEY) == f"epd.v1.ready.{KEY}"
    assert subjects.cancel_subject("r") == "epd.v1.cancel.r"
    assert subjects.replay_subject("r") == "epd.v1.replay.r"
    assert subjects.dlq_subject("encode") == "epd.v1.dlq.encode"
    assert subjects.encode_consumer("o/m", "l1") == "encode-o=2Fm-l1"
    assert subjects.generate_consumer("o/m", "l1") == "generate-o=2Fm-l1-any"
    assert subjects.worker_key("pd", "w") == "pd.w"


# -- lanes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "last", "lane"), [(0, 1, "l0"), (2, 5, "l1"), (6, 13, "l2"), (14, 1000, "l3")]
)
def test_lanes_by_place(first: int, last: int, lane: str) -> None:
    for position in (first, last):
        assert encode_lane(position) == lane
        assert generate_lane(position + 1) == lane
    assert generate_lane(0) == "l0", "text only"


# -- keys ----------------------------------------------------------------------------------------


def test_digest_is_sha256_of_the_bytes() -> None:
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert digest(b"") == digest(memoryview(b"")) == empty


def test_keys_differ_in_every_part() -> None:
    base: dict[str, Any] = {
        "media_digest": digest(b"a"),
        "fingerprint": "f" * 64,
        "modality": "image",
        "processor_args": {"a": 1, "b": 2},
        "scope": "s",
    }
    changed: list[dict[str, Any]] = [
        {},
        {"media_digest": digest(b"b")},
        {"fingerprint": "e" * 64},
        {"modality": "video"},
        {"processor_args": {"a": 1, "b": 3}},
        {"processor_args": None},
        {"scope": ""},
    ]
    keys = [embedding_key(**base | change) for change in changed]
    assert len(set(keys)) == len(keys)
    assert all(is_key(key) for key in keys)
    assert embedding_key(**base | {"processor_args": {"b": 2, "a": 1}}) == keys[0]
    assert embedding_key(**base | {"processor_args": {}}) == keys[5]


@pytest.mark.parametrize(
    "text", ["", "a" * 63, "a" * 65, "A" * 64, "g" * 64, "../" + "a" * 61, "a" * 64 + "\n"]
)
def test_fc34_not_a_key(text: str) -> None:
    assert not is_key(text)


@pytest.mark.parametrize(
    "receipt",
    [
        5,
        [],
        {"worker": 5},
        {"worker": "w", "node": "n", "attempt": 1, "queued_s": 0.0, "items": [{"rescue": "new"}]},
    ],
)
def test_a_receipt_that_is_none_costs_no_answer(receipt: object) -> None:
    """It is told for people; a newer worker may have another way to say it."""
    names = {"v": 1, "request_id": "r", "attempt": 1, "seq": 2}
    end = decode_reply(msgspec.msgpack.encode({"t": "end", **names, "receipt": receipt}))
    assert end == ReplyEnd(request_id="r", attempt=1, seq=2)
    error = {"t": "error", **names, "status": 500, "code": "c", "message": "m", "receipt": receipt}
    assert decode_reply(msgspec.msgpack.encode(error)).receipt is None  # type: ignore[union-attr]
    with pytest.raises(ProtocolError, match="seq"):
        decode_reply(msgspec.msgpack.encode({"t": "end", **names, "seq": "2", "receipt": receipt}))
