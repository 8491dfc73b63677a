"""The chaos run: what its verdict says, how its clients behave, and a short one that has to pass."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.chaos.faults import Fault
from bench.chaos.load import Load, Outcome, Requests
from bench.chaos.report import Run, page, plot, verdict
from epd_sim.answers import expected_answer

MIB = 1 << 20


def outcome(number: int, ended: str = "answered") -> Outcome:
    return Outcome(
        number=number,
        began_s=number / 10,
        took_s=0.1,
        ended=ended,
        tries=1,
        pictures=0,
        stream=False,
        detail="'a' instead of 'b'",
    )


def passed() -> Run:
    """A run of 200 requests of which two were errors."""
    return Run(
        seed=1,
        rate=10,
        every_s=2,
        requests=200,
        lasted_s=20,
        limit_s=60,
        machine="m",
        date="d",
        outcomes=[outcome(n, "worker_lost" if n < 2 else "answered") for n in range(200)],
        faults=[Fault(1.0, "pd-1", "pd", "kill")],
        memory=[{"at_s": n, "seen": {"pd-1": (50 * MIB, 20.0)}} for n in range(30)],
        late=[],
        differences=[],
        notes=[],
        totals={},
        letters=0,
        pending={},
        sent_again=0,
    )


def with_end(ended: str, times: int = 1) -> Callable[[Run], Run]:
    """Some of the requests ended in this way."""

    def change(run: Run) -> Run:
        others = [outcome(n, ended) for n in range(times)] + run.outcomes[times:]
        return dataclasses.replace(run, outcomes=others)

    return change


def grown(run: Run) -> Run:
    late = [{"at_s": n, "seen": {"pd-1": (100 * MIB, 20.0)}} for n in range(20, 30)]
    return dataclasses.replace(run, memory=run.memory[:20] + late)


def test_a_run_in_which_all_holds_passes() -> None:
    assert verdict(passed()) == []
    assert "198 (99.00 %)" in page(passed())


@pytest.mark.parametrize(
    ("flaw", "says"),
    [
        (lambda run: dataclasses.replace(run, outcomes=run.outcomes[2:]), "200 requests went in"),
        (
            lambda run: dataclasses.replace(run, outcomes=[*run.outcomes, outcome(5)]),
            "200 requests went in and 201",
        ),
        (with_end("wrong"), "1 answers are wrong; request 0: 'a' instead of 'b'"),
        (with_end("never_ended"), "1 requests did not end within 60 s"),
        (with_end("worker_lost", 3), "only 197 of 200 were answered: {'worker_lost': 3}"),
        (lambda run: dataclasses.replace(run, late=["pd-1"]), "not serving again"),
        (lambda run: dataclasses.replace(run, differences=["x"]), "accounts: x"),
        (grown, "memory of pd grew from 50 MiB to 100 MiB"),
    ],
)
def test_what_does_not_hold_is_named(flaw: Callable[[Run], Run], says: str) -> None:
    (failure,) = verdict(flaw(passed()))
    assert failure.startswith(says)


def test_the_page_has_the_kinds_of_workers_that_ran() -> None:
    seen = {"prefill-1": (50 * MIB, 20.0), "decode-1": (50 * MIB, 20.0)}
    answered = [
        dataclasses.replace(outcome(n), detail=f"{'decode' if n % 4 else 'prefill'}-1")
        for n in range(200)
    ]
    run = dataclasses.replace(
        passed(),
        outcomes=answered,
        faults=[Fault(1.0, "decode-1", "decode", "freeze")],
        memory=[{"at_s": n, "seen": seen} for n in range(30)],
    )
    lines = page(run).splitlines()
    assert [line for line in lines if line.startswith(("| pd", "| prefill", "| decode"))] == [
        "| prefill | 0 | 0 | 0 | 50 MiB | 50 MiB |",
        "| decode | 0 | 1 | 0 | 50 MiB | 50 MiB |",
    ]
    assert "| answered by | `decode` 150, `prefill` 50 |" in lines
    assert "answered by" not in page(passed())


@pytest.mark.slow  # it looks at all fonts
def test_the_plot_can_be_drawn(tmp_path: Path) -> None:
    plot(passed(), tmp_path / "chaos.png")
    assert (tmp_path / "chaos.png").read_bytes().startswith(b"\x89PNG")


def test_a_request_comes_from_seed_and_number_alone() -> None:
    assert Requests(1).make(7) == Requests(1).make(7)
    assert Requests(1).make(7) != Requests(2).make(7)
    made = [Requests(1).make(number) for number in range(60)]
    assert {len(pictures) for _, pictures in made} == {0, 1, 2, 3, 4}
    sent = [data for _, pictures in made for data in pictures]
    assert len(set(sent)) < len(sent), "some are sent more than once"


class Gateway:
    """Answers each connection with the next of its replies; None closes it without a byte."""

    def __init__(self, *replies: bytes | None) -> None:
        self.replies = list(replies)
        self.asked = 0

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *failure: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked += 1
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))
        reply = self.replies.pop(0) if self.replies else None
        if reply is not None:
            writer.write(reply)
            await writer.drain()
        writer.close()


def http(status: int, body: dict[str, Any], *, cut: int = 0) -> bytes:
    raw = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(raw)}\r\nretry-after: 0\r\n\r\n"
    return head.encode() + raw[: len(raw) - cut]


def busy() -> bytes:
    return http(503, {"error": {"code": "unavailable", "message": "m"}})


def answer(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}}]}


async def ended(*gateways: Gateway, seed: int) -> tuple[str, int]:
    """How the first request of a run ended, and after how many tries."""
    async with gateways[0] as one, gateways[1] as two:
        load = Load((one, two), seed, requests=1, rate=1000, began=0.0)
        await load.run()
    (found,) = load.outcomes
    return found.ended, found.tries


async def test_clients_ask_the_next_gateway_and_check_the_answer() -> None:
    seed = next(s for s in range(50) if not Requests(s).make(0)[0]["stream"])
    body, pictures = Requests(seed).make(0)
    right = http(200, answer(expected_answer(body, pictures)))
    assert await ended(Gateway(right), Gateway(), seed=seed) == ("answered", 1)
    assert await ended(Gateway(busy()), Gateway(right), seed=seed) == ("answered", 2)
    assert await ended(Gateway(None), Gateway(right), seed=seed) == ("answered", 2)
    wrong = http(200, answer("something else"))
    assert await ended(Gateway(wrong), Gateway(right), seed=seed) == ("wrong", 1)
    cut = http(200, answer("x" * 100), cut=50)
    assert await ended(Gateway(cut), Gateway(right), seed=seed) == ("gateway_lost_mid_answer", 1)
    failed = http(502, {"error": {"code": "worker_lost", "message": "m"}})
    assert await ended(Gateway(failed), Gateway(right), seed=seed) == ("worker_lost", 1)
    full = [Gateway(*[busy()] * 9), Gateway(*[busy()] * 9)]
    assert await ended(*full, seed=seed) == ("unavailable", 10)


@pytest.mark.chaos
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("requests", "workers"),
    [(1500, ()), (700, ("--prefills", "3", "--decodes", "3"))],
    ids=["two stages", "three stages"],
)
async def test_a_short_run_passes(requests: int, workers: tuple[str, ...], tmp_path: Path) -> None:
    """With one fault every two seconds."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.chaos", "--requests", str(requests), "--seed", "1"),
        *("--out", str(tmp_path), *workers),
    )
    try:
        async with asyncio.timeout(400):
            code = await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    found = json.loads((tmp_path / "chaos.json").read_text())
    assert found["verdict"] == []
    assert code == 0
    if workers:
        answered = [each for each in found["outcomes"] if each["ended"] == "answered"]
        decoded = [each for each in answered if each["detail"].startswith("decode-")]
        assert len(decoded) >= len(answered) // 2
