"""Structured logs: every line about a job has its request id, and its key where it is about an item."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from epd_common.protocol import EncodeJob, Media
from epd_common.protocol.codec import encode
from epd_common.protocol.names import names_in
from epd_common.telemetry.logs import configure_logging, log_about
from service_stack import ServiceStack, bare_stack, eventually, picture, service_stack


@pytest.fixture
def log_lines(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a service logs, in the form that it logs it in."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    configure_logging("info", "json")
    lines = io.StringIO()
    handler = root.handlers[0]
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(lines)
    return lines


def test_a_text_for_terminals_is_not_logged_beside_the_text(log_lines: io.StringIO) -> None:
    """As uvicorn has it."""
    logging.getLogger("uvicorn").info("gone", extra={"color_message": "\x1b[36mgone", "n": 1})
    assert [set(line) for line in read(log_lines)] == [{"ts", "level", "logger", "message", "n"}]


async def test_what_a_job_s_tasks_and_threads_log_is_about_it(log_lines: io.StringIO) -> None:
    logger = logging.getLogger("epd")

    async def item() -> None:
        log_about(key="k")
        await asyncio.to_thread(logger.info, "in a thread")
        logger.info("of another", extra={"key": "other"})

    async def job() -> None:
        log_about(request_id="r")
        logger.info("in the job")
        await asyncio.create_task(item())
        logger.info("after the item")

    await asyncio.create_task(job())
    logger.info("outside")
    assert [
        (line["message"], line.get("request_id"), line.get("key")) for line in read(log_lines)
    ] == [
        ("in the job", "r", None),
        ("in a thread", "r", "k"),
        ("of another", "r", "other"),
        ("after the item", "r", None),
        ("outside", None, None),
    ]


def test_names_are_read_from_whatever_comes() -> None:
    job = EncodeJob(
        key="a" * 64,
        epoch=1,
        model="m",
        fingerprint="f",
        modality="image",
        media=Media(ref="b" * 64),
        request_id="req-1",
    )
    assert names_in(encode(job)) == {"request_id": "req-1", "key": "a" * 64}
    bad = encode(job).replace(b"req-1", b"r\nq-1").replace(b"a" * 64, b"/" * 64)
    assert names_in(bad) == {}, "nothing that could forge a line"
    for data in (b"", b"\xc1", b"\x91" * 5000, b"\x81\xaarequest_id\x01"):
        assert names_in(data) == {}


def read(lines: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.getvalue().splitlines()]


@pytest.mark.slow
async def test_lines_about_a_job_name_its_request_and_its_item(
    nats_url: str, redis_url: str, tmp_path: Path, log_lines: io.StringIO
) -> None:
    """An encode that is tried again, one that is refused, and a request that is given back."""

    def logged(text: str) -> list[dict[str, Any]]:
        return [line for line in read(log_lines) if text in line["message"]]

    async with service_stack(nats_url, redis_url, tmp_path) as stack:
        again, refused = picture(), picture()
        encoder, pd = stack.encoders[0].engine, stack.pds[0].engine
        encoder.failures, encoder.refuse = 1, refused
        done = await stack.ask("tried again", again)
        assert done.status_code == 200
        failed = await stack.ask("refused", refused)
        assert failed.status_code == 400
        given_back = await crashed(stack, pd, lambda: bool(logged("given back")))

    done_id, failed_id = (answer.headers["x-request-id"] for answer in (done, failed))
    for text, request_id, key in (
        ("encode failed, to be tried again", done_id, stack.key(again)),
        ("item was encoded at attempt 2", done_id, stack.key(again)),
        ("encode failed: no vision tower", failed_id, stack.key(refused)),
        ("request failed: ", failed_id, stack.key(refused)),
        ("job failed by an unexpected error; given back", given_back, None),
    ):
        lines = logged(text)
        assert lines, text
        assert {(line["request_id"], line.get("key")) for line in lines} == {(request_id, key)}


async def test_lines_about_an_item_that_a_pd_worker_encodes_name_it(
    nats_url: str, redis_url: str, tmp_path: Path, log_lines: io.StringIO
) -> None:
    """By an engine with a bug, whose error nobody foresaw."""

    async def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    async with bare_stack(nats_url, redis_url, tmp_path) as stack:
        pd = await stack.add_pd(local_encode="always", encode_attempts=1)
        await stack.add_gateway()
        await stack.ready()
        pd.engine.tower.encode = fail
        data = picture()
        answer = await stack.ask("what is it?", data)
        assert answer.status_code == 502
    (line,) = (line for line in read(log_lines) if line.get("exception", "").endswith("a bug"))
    assert line["request_id"] == answer.headers["x-request-id"]
    assert line["key"] == stack.key(data)


async def crashed(stack: ServiceStack, engine: Any, given_back: Any) -> str:
    """Have a request given back once, as the engine has a bug, and answered then; its id."""
    engine.crash = True
    asking = asyncio.ensure_future(stack.ask("crashed"))
    await eventually(given_back, "it is given back")
    engine.crash = False
    answer = await asking
    assert answer.status_code == 200
    return str(answer.headers["x-request-id"])
