"""``epd top``: what it counts and draws, and the view beside real brokers and services."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from epd_cli.brokers import Brokers, embedded_brokers
from epd_cli.top import top
from epd_cli.top.look import Look, Seen
from epd_cli.top.rates import Rates, rates
from epd_cli.top.requests import PATH, RecentRequests, reachable, row
from epd_cli.top.view import Frame, draw
from epd_common.bus.queues import LaneLength
from epd_common.errors import UnavailableError
from epd_common.protocol import WorkerRecord
from service_stack import eventually, picture
from sim_stack import SimStack, sim_stack


def seen(role: str, worker: str, *, alive: bool = True, **fields: Any) -> Seen:
    counters = fields.pop("counters", None)
    given = {"state": "ready", "node": "n1", "beat": 1, **fields}
    return Seen(WorkerRecord(role=role, worker=worker, **given), alive, counters)  # type: ignore[arg-type]


def shown(frame: Frame, *, height: int | None = None, width: int = 160) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(draw(frame, height=height))
    return out.getvalue()


# -- rates ------------------------------------------------------------------------------------------


def test_rates_are_what_the_workers_counted_between_two_looks() -> None:
    before = Look(
        10.0,
        [
            seen("pd", "pd-1", counters={"answered": 100, "failed": 1}),
            seen("pd", "pd-2", counters={"answered": 50}),
            seen("encoder", "e-1", counters={"encoded": 10, "hits": 5}),
        ],
    )
    now = Look(
        12.0,
        [
            seen("gateway", "g-1"),
            seen("pd", "pd-1", counters={"answered": 110, "failed": 2, "expired": 1}),
            seen("pd", "pd-2", counters={"answered": 50, "encoded_here": 4}),
            seen("pd", "new", counters={"answered": 7}),
            seen("encoder", "e-1", counters={"encoded": 16, "hits": 7}),
        ],
    )
    found = rates(before, now)
    assert found.all == {"answered": 5.0, "failed": 1.0, "encodes": 5.0, "hits": 1.0}
    assert found.workers == {"pd.pd-1": 5.0, "pd.pd-2": 0.0, "encoder.e-1": 4.0}


def test_a_worker_that_was_started_anew_counts_for_nothing_once() -> None:
    before = Look(10.0, [seen("pd", "pd-1", pid=1, counters={"answered": 100})])
    again = Look(11.0, [seen("pd", "pd-1", pid=2, counters={"answered": 3})])
    silent = Look(11.0, [seen("pd", "pd-1", pid=1)])
    assert rates(before, again).workers == rates(before, silent).workers == {}
    assert rates(before, before) == Rates()


# -- the frame --------------------------------------------------------------------------------------


def frame(**fields: Any) -> Frame:
    look = Look(
        1.0,
        [
            seen(
                "pd", "pd-1", slots=8, busy=3, arena_used_bytes=1 << 29, arena_quota_bytes=1 << 30
            ),
            seen("encoder", "e-1", state="failed", error="the encoder's engine died"),
            seen("encoder", "e-2", alive=False),
        ],
        {"encode": {"l0": LaneLength(4, 0.25), "l3": LaneLength(900, 61.0)}, "generate": {}},
        ["qwen"],
    )
    given: dict[str, Any] = {
        "clock": "12:00:00",
        "look": look,
        "rates": Rates({"answered": 12.5}, {"pd.pd-1": 12.5}),
        **fields,
    }
    return Frame(**given)


def test_a_frame_shows_workers_queues_and_arenas() -> None:
    text = shown(frame())
    assert re.search(r"pd-1 +pd +ready +n1 +3/8 +12\.5", text)
    assert re.search(r"e-1 +encoder +failed +n1 +0 +silent +the encoder's engine died", text)
    assert re.search(r"e-2 +encoder +dead", text)
    assert re.search(r"encode +4, 0\.2 s +- +- +900, 61\.0 s +-", text)
    assert re.search(r"n1 +512 MiB +1\.0 GiB +#{10}\.{10} +50%", text)
    assert "models: qwen" in text and "answered 12.5/s" in text
    assert "recent requests" not in text and "away" not in text


def test_who_is_in_trouble_stands_first() -> None:
    text = shown(frame())
    assert text.index("e-1 ") < text.index("pd-1") and text.index("e-2") < text.index("pd-1")


def test_a_frame_says_that_nats_is_away() -> None:
    assert "NATS is away since 11:59:50" in shown(frame(away="since 11:59:50, 10 s (lost)"))


def test_a_frame_fits_its_terminal() -> None:
    look = Look(1.0, [seen("pd", f"pd-{n}") for n in range(200)], {"encode": {}, "generate": {}})
    receipts = [row({"request_id": f"r-{n}"}) for n in range(50)]
    text = shown(frame(look=look, requests=receipts), height=40)
    assert len(text.splitlines()) <= 40
    assert re.search(r"and 1\d\d more", text) and "r-0" in text


def test_what_others_named_is_text_and_nothing_else() -> None:
    look = Look(1.0, [seen("pd", "x[red]", node="\x1b[2J", phase="a\nb")])
    text = shown(frame(look=look, requests=[row({"request_id": "\x1b]0;x\x07"})]))
    assert "\x1b" not in text and "x[red]" in text and "a\\nb" in text


def test_before_the_second_look_there_are_no_rates() -> None:
    text = shown(frame(rates=None, note="recent requests need an API key"))
    assert "rates: after the next look" in text and "need an API key" in text


# -- recent requests --------------------------------------------------------------------------------

RECEIPT = {
    "request_id": "req-1",
    "model": "qwen",
    "status": 200,
    "state": "answered",
    "first_s": 0.12,
    "ended_s": 1.5,
    "pd": {"worker": "pd-1"},
    "items": [{"origin": "encoded"}, {"origin": "reused"}, {"origin": "reused"}],
}


def test_a_receipt_in_words() -> None:
    found = row(RECEIPT)
    assert (found.request_id, found.state, found.pd) == ("req-1", "answered", "pd-1")
    assert (found.items, found.first, found.ended) == ("1 encoded, 2 reused", "0.120 s", "1.500 s")
    assert row({"state": "failed", "status": 504}).state == "failed 504"


@pytest.mark.parametrize(
    "receipt",
    [{}, {"items": 7, "pd": [], "first_s": "soon"}, {"items": [1, {}], "status": None}],
)
def test_a_receipt_that_lacks_things(receipt: dict[str, Any]) -> None:
    assert row(receipt).first == ""


def test_a_gateway_on_all_addresses_is_asked_on_this_machine() -> None:
    assert reachable("http://0.0.0.0:8000") == "http://127.0.0.1:8000"
    assert reachable("http://10.0.0.7:8000") == "http://10.0.0.7:8000"


class FakeGateway:
    """Answers as it is told, and keeps what it was sent."""

    def __init__(self) -> None:
        self.status, self.body = 200, json.dumps({"requests": [RECEIPT, 7]})
        self.keys: list[str | None] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("authorization"))
        return web.Response(status=self.status, text=self.body)


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    made = FakeGateway()
    application = web.Application()
    application.router.add_get(PATH, made.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield made
    finally:
        await runner.cleanup()


async def test_requests_are_shown_where_a_gateway_tells(gateway: FakeGateway) -> None:
    async with RecentRequests(gateway.url, key="secret") as requests:
        assert await requests.rows([]) == [row(RECEIPT)]
    async with RecentRequests("", key="secret") as requests:
        assert await requests.rows([gateway.url]) == [row(RECEIPT)]
    assert gateway.keys == ["Bearer secret", None]  # none for what a record claims


@pytest.mark.parametrize(
    ("status", "body", "note"),
    [
        (401, "{}", "EPD_API_KEY"),
        (404, "{}", ""),
        (200, "no JSON", ""),
        (200, "[]", ""),
        (200, '{"requests": 7}', ""),
    ],
)
async def test_a_gateway_that_does_not_tell_is_left_alone(
    gateway: FakeGateway, status: int, body: str, note: str
) -> None:
    gateway.status, gateway.body = status, body
    async with RecentRequests(gateway.url, key="") as requests:
        assert await requests.rows([]) is None
        assert note in requests.note and bool(note) == bool(requests.note)
        assert await requests.rows([]) is None
    assert len(gateway.keys) == 1  # it is not asked at each look


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:8000", "gateway", "http://[x"])
async def test_a_gateway_that_was_named_and_does_not_answer_is_told_of(url: str) -> None:
    async with RecentRequests(url) as requests:
        for _ in range(2):
            assert await requests.rows([]) is None
            assert requests.note.startswith(f"no recent requests, as {url} (--gateway) does not")


async def test_no_gateway_at_all() -> None:
    async with RecentRequests("") as requests:
        assert await requests.rows(["http://127.0.0.1:9"]) is None and not requests.note
    async with RecentRequests("") as requests:
        assert await requests.rows([]) is None


# -- beside real brokers and services ---------------------------------------------------------------


def console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=160, color_system=None), out


async def once(nats_url: str) -> str:
    target, out = console()
    assert await top(nats_url, once=True, interval_s=0.2, console=target) == 0
    return out.getvalue()


async def test_nobody_has_started_yet(tmp_path: Path) -> None:
    async with embedded_brokers(tmp_path, redis=False) as brokers:
        text = await once(brokers.nats_url)
    assert "nobody is there" in text and "models: none ready" in text


@pytest.mark.slow
async def test_one_frame_of_services_with_jobs_in_their_queues(tmp_path: Path) -> None:
    """With an operator's rights."""
    async with (
        embedded_brokers(tmp_path / "brokers") as brokers,
        sim_stack(brokers.nats_url, brokers.redis_url, tmp_path) as stack,
    ):
        await stack.start()
        first = await stack.ask("first", picture())
        assert first.status_code == 200
        stack.encoder_time.passing.clear()
        asking = asyncio.gather(stack.ask("second", *(picture() for _ in range(7))))
        try:
            await eventually(lambda: _waits(stack), "jobs wait")
            text = await once(brokers.nats.url_for("operator"))
        finally:
            stack.encoder_time.passing.set()
        assert [answer.status_code for answer in await asking] == [200]
    for worker in (stack.encoders[0].id, stack.pds[0].id, stack.gateway_id):
        assert worker in text
    # Two pictures are on the first lane, four on the second, one on the third.
    lanes = re.search(r"encode +(\d+), [\d.]+ s +(\d+), [\d.]+ s +(\d+), [\d.]+ s", text)
    assert lanes is not None and [int(each) >= 1 for each in lanes.groups()] == [True] * 3, text
    assert re.search(r"generate[ -]+1, (?!0\.0 s)[\d.]+ s", text), text
    assert stack.model in text and "answered 0.0/s" in text
    shown_first = rf"{first.headers['x-request-id']} +answered +{stack.model} +1 encoded"
    assert re.search(shown_first, text), text


async def _waits(stack: SimStack) -> bool:
    return await stack.busy(stack.encoders[0]) > 0


@pytest.mark.slow
async def test_rates_are_seen(nats_url: str, redis_url: str, tmp_path: Path) -> None:
    async with sim_stack(nats_url, redis_url, tmp_path) as stack:
        await stack.start()
        target, out = console()
        stop = asyncio.Event()
        watching = asyncio.create_task(top(nats_url, interval_s=0.1, console=target, stop=stop))

        async def seen_at_work() -> bool:
            assert (await stack.ask("more", picture())).status_code == 200
            text = out.getvalue()
            return all(
                re.search(rf"{kind} (?!0\.0)[\d.]+/s", text) for kind in ("answered", "encodes")
            )

        try:
            await eventually(seen_at_work, "rates above 0")
        finally:
            stop.set()
            assert await watching == 0


@pytest.mark.slow
async def test_it_says_that_nats_is_away_and_goes_on_when_it_is_back(tmp_path: Path) -> None:
    async with embedded_brokers(tmp_path) as brokers:
        async with sim_stack(brokers.nats_url, brokers.redis_url, tmp_path) as stack:
            await stack.start()
            target, out = console()
            stop = asyncio.Event()
            watching = asyncio.create_task(
                top(brokers.nats_url, interval_s=0.1, console=target, stop=stop)
            )
            encoder = stack.encoders[0].id
            try:
                await eventually(lambda: encoder in out.getvalue(), "it shows the encoder")
                await brokers.nats.stop()
                await eventually(lambda: "NATS is away since" in _last(out), "it says so")
                assert encoder in _last(out)  # as it was
                await brokers.nats.start()
                await eventually(lambda: _well(out, encoder), "it goes on", 30)
            finally:
                stop.set()
                assert await watching == 0


def _last(out: io.StringIO) -> str:
    return "epd top " + out.getvalue().rpartition("epd top ")[2]


def _well(out: io.StringIO, worker: str) -> bool:
    last = _last(out)
    return "away" not in last and re.search(rf"{worker} +encoder +ready", last) is not None


@pytest.mark.slow
async def test_without_nats_it_ends_and_says_why() -> None:
    started = time.monotonic()
    with pytest.raises(UnavailableError, match="cannot connect to NATS at"):
        await top("nats://127.0.0.1:9", once=True)
    assert time.monotonic() - started < 20


async def run_top(*arguments: str) -> asyncio.subprocess.Process:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("EPD_")}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "epd_cli", "top", *arguments),
        env=clean,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.slow
async def test_the_command_ends_with_an_exit_code(own: Brokers, tmp_path: Path) -> None:
    folder = str(tmp_path)
    nobody = await run_top("--state-dir", folder)
    out, err = await asyncio.wait_for(nobody.communicate(), 30)
    assert nobody.returncode == 1 and b"nothing is ready here" in err and not out
    wrong = re.sub(r":[0-9a-f]{32}@", ":mistyped@", own.nats_url)
    refused = await run_top("--nats", wrong, "--once")
    out, err = await asyncio.wait_for(refused.communicate(), 30)
    assert refused.returncode == 1 and b"Authorization Violation" in err
    assert b"Traceback" not in err and b"mistyped" not in err
    typed = await run_top("--nats", own.nats_url, "--interval", "0")
    _, err = await asyncio.wait_for(typed.communicate(), 30)
    assert typed.returncode == 2 and b"0.1 to 3600" in err


@pytest.mark.slow
async def test_in_a_pipe_it_prints_frames_until_its_reader_goes_or_a_signal_comes(
    own: Brokers,
) -> None:
    for ends in ("reader", "signal"):
        running = await run_top("--nats", own.nats_url, "--interval", "0.1")
        assert running.stdout is not None and running.stderr is not None
        frames = 0
        async with asyncio.timeout(30):
            while frames < 2:
                frames += (await running.stdout.readline()).startswith(b"epd top ")
            if ends == "signal":
                running.terminate()
                await running.stdout.read()
            else:
                running.stdout._transport.close()  # type: ignore[attr-defined]
            err = await running.stderr.read()
            assert (await running.wait(), err) == (0, b""), ends


@pytest.mark.slow
async def test_a_terminal_comes_back_as_it_was_at_ctrl_c(own: Brokers) -> None:
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    clean = {k: v for k, v in os.environ.items() if not k.startswith("EPD_")}
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "epd_cli", "top", "--nats", own.nats_url, "--interval", "0.1"),
        env={**clean, "TERM": "xterm"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(terminal)
    written = bytearray()

    def read() -> None:
        try:
            written.extend(os.read(master, 65536))
        except OSError:  # its end
            asyncio.get_running_loop().remove_reader(master)

    asyncio.get_running_loop().add_reader(master, read)
    try:
        await eventually(lambda: written.count(b"epd top") >= 3, "frames", 30)
        os.write(master, b"\x03")  # Ctrl-C
        async with asyncio.timeout(10):
            assert await running.wait() == 0
        await eventually(lambda: b"\x1b[?1049l" in written, "the screen of before is back")
        assert b"\x1b[?25h" in written and b"Traceback" not in written  # and its cursor
    finally:
        asyncio.get_running_loop().remove_reader(master)
        os.close(master)
        if running.returncode is None:
            running.kill()


@pytest.fixture(scope="module")
async def own(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Brokers]:
    async with embedded_brokers(tmp_path_factory.mktemp("top"), redis=False) as running:
        yield running
