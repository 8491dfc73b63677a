"""The load harness's client against a server whose answers and times are known."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest

from epd_bench.bodies import BodyMaker
from epd_bench.builtin import RandomMm, find_workload
from epd_bench.client import Client, Outcome
from epd_bench.errors import BenchError
from epd_bench.goodput import NoRateError, find_goodput
from epd_bench.load import Load, run_load
from epd_bench.options import Pace
from epd_bench.probing import Prober
from epd_bench.slo import parse_slo
from epd_bench.stream import StreamWatch
from epd_bench.workloads import generate
from scripted_server import DONE, Script, ScriptedServer, event, scripted_server, tokens, usage

LIGHT = find_workload("random-mm", RandomMm(sizes="8x8", text=5, output=4))


async def outcomes_of(
    server: ScriptedServer, pace: Pace, *, timeout_s: float = 10.0
) -> tuple[Load, list[Outcome]]:
    bodies = BodyMaker("m", 1, {})
    async with Client(server.url, timeout_s=timeout_s) as client:
        load = await run_load(client, bodies, generate(LIGHT, 1), pace, 1, lambda load: False)
    return load, sorted(load.outcomes, key=lambda outcome: outcome.number)


async def test_times_are_those_of_the_server() -> None:
    scripts = {
        "u0-0": tokens(5, first_s=0.1, each_s=0.05),
        "u0-1": tokens(5, first_s=0.3, each_s=0.1),
    }

    def answer(body: dict[str, Any]) -> Script:
        return scripts[body["messages"][0]["content"][-1]["text"].split(".")[0]]

    async with scripted_server(answer) as server:
        _, (fast, slow) = await outcomes_of(server, Pace(users=2, requests=2))
    for outcome, first_s, each_s in ((fast, 0.1, 0.05), (slow, 0.3, 0.1)):
        assert not outcome.failure and outcome.output_tokens == 5 and outcome.usage
        assert outcome.ttft_s >= first_s and outcome.tpot_s >= each_s
        assert outcome.e2e_s >= first_s + 4 * each_s
        assert outcome.ttft_s < outcome.e2e_s - 2 * each_s
        assert len(outcome.gaps_s) == 4 and min(outcome.gaps_s) > each_s / 2
        assert (outcome.prompt_tokens, outcome.images) == (7, 1)
    assert fast.ttft_s < slow.ttft_s and fast.tpot_s < slow.tpot_s and fast.e2e_s < slow.e2e_s


async def test_bytes_are_counted_and_bodies_arrive_whole() -> None:
    async with scripted_server(lambda body: tokens(2, first_s=0, each_s=0)) as server:
        _, (outcome,) = await outcomes_of(server, Pace(users=1, requests=1))
    whole = len(event(None) + event("a") + event(" b") + usage(7, 2) + DONE)
    assert outcome.received_bytes == whole
    assert outcome.sent_bytes == len(BodyMaker("m", 1, {}).body(next(generate(LIGHT, 1))))
    assert json.loads(BodyMaker("m", 1, {}).body(next(generate(LIGHT, 1)))) == server.bodies[0]


async def test_without_usage_events_are_counted() -> None:
    async with scripted_server(
        lambda body: tokens(3, first_s=0, each_s=0.02, with_usage=False)
    ) as server:
        _, (outcome,) = await outcomes_of(server, Pace(users=1, requests=1))
    assert (outcome.output_tokens, outcome.usage, outcome.failure) == (3, False, "")


ERROR = b'data: {"error": {"message": "gone", "code": "lost"}}\n\n'

FAILURES = {
    "503 queue_full": Script([b'{"error": {"message": "m", "code": "queue_full"}}'], 503),
    "500": Script([b"oops"], 500),
    "stream_without_end": Script([event(None) + event("a")]),
    "stream_error lost": Script([event(None) + event("a"), 0.01, ERROR + DONE]),
    "stream_without_tokens": Script([event(None) + DONE]),
    "cut_off": Script([event(None) + event("a"), 0.01, None]),
    "timeout": Script([event(None) + event("a"), 5.0]),
}


async def test_failures_are_told_apart() -> None:
    numbers = itertools.count()
    wanted = list(FAILURES)
    async with scripted_server(lambda body: FAILURES[wanted[next(numbers)]]) as server:
        _, found = await outcomes_of(server, Pace(users=1, requests=len(wanted)), timeout_s=1.0)
    assert [outcome.failure for outcome in found] == wanted
    assert found[0].status == 503 and "queue_full" in found[0].detail
    assert found[1].detail == "oops"


async def test_server_that_is_not_there() -> None:
    async with scripted_server(lambda body: Script()) as server:
        pass
    _, (outcome,) = await outcomes_of(server, Pace(users=1, requests=1))
    assert (outcome.failure, outcome.status) == ("no_connection", 0)


async def test_open_loop_does_not_wait_for_answers() -> None:
    async with scripted_server(lambda body: tokens(1, first_s=0.5, each_s=0)) as server:
        load, found = await outcomes_of(server, Pace(rate=100.0, burstiness=1000.0, requests=20))
    assert server.most_open == 20, "all were sent before the first one was answered"
    assert [outcome.at_s for outcome in found] == sorted(outcome.at_s for outcome in found)
    assert 0.15 < found[-1].at_s
    assert load.lasted_s >= found[-1].at_s + 0.5
    assert len(load.pictures) == 20


async def test_closed_loop_has_so_many_at_a_time() -> None:
    async with scripted_server(lambda body: tokens(1, first_s=0.02, each_s=0)) as server:
        _, found = await outcomes_of(server, Pace(users=3, requests=12))
    assert server.most_open == 3
    assert len(found) == 12 and not any(outcome.failure for outcome in found)


async def test_several_servers_are_asked_in_turn() -> None:
    script = tokens(1, first_s=0, each_s=0)
    async with (
        scripted_server(lambda body: script) as one,
        scripted_server(lambda body: script) as two,
    ):
        async with Client(f"{one.url}/v1, {two.url}") as client:
            for request in itertools.islice(generate(LIGHT, 1), 6):
                await client.ask(request, b"{}")
        assert len(one.bodies) == len(two.bodies) == 3


async def test_duration_ends_the_sending() -> None:
    async with scripted_server(lambda body: tokens(1, first_s=0, each_s=0)) as server:
        _, found = await outcomes_of(server, Pace(rate=100.0, duration_s=0.3))
        assert all(outcome.at_s - outcome.late_s <= 0.3 for outcome in found) and len(found) > 10
        _, found = await outcomes_of(server, Pace(rate=100.0, duration_s=0.01, least=7))
        assert len(found) == 7


def test_chunks_may_be_cut_anywhere() -> None:
    stream = event(None) + event("a") + event(" b") + event(" c") + usage(3, 3) + DONE
    for cut in range(1, len(stream)):
        watch = StreamWatch()
        watch.feed(stream[:cut], 1.0)
        watch.feed(stream[cut:], 2.0)
        end = watch.end()
        assert (end.error, end.prompt_tokens, end.completion_tokens) == ("", 3, 3), cut
        first_token_ends = len(event(None) + event("a")) - 1  # an event's line is enough
        assert watch.first_token_at == (1.0 if cut >= first_token_ends else 2.0), cut


def test_line_ends_of_other_servers_are_read() -> None:
    watch = StreamWatch()
    stream = event(None) + event("a") + usage(3, 1) + DONE
    watch.feed(stream.replace(b"\n", b"\r\n"), 1.0)
    assert watch.first_token_at == 1.0 and watch.end().completion_tokens == 1


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x"])
def test_address_that_is_none(url: str) -> None:
    with pytest.raises(BenchError, match="no address"):
        Client(url)


def prober(server: ScriptedServer, client: Client, slo: str, **options: Any) -> Prober:
    given: dict[str, Any] = {"probe_s": 0.5, "least": 5, "burstiness": 100.0, **options}
    return Prober(
        client=client,
        bodies=BodyMaker("m", 1, {}),
        requests=generate(LIGHT, 1),
        slo=parse_slo(slo),
        seed=1,
        say=lambda line: None,
        **given,
    )


@pytest.mark.slow
async def test_goodput_of_a_server_that_gets_slow() -> None:
    """It answers at once while few requests are open, and too late where there are many."""
    server: ScriptedServer

    def answer(body: dict[str, Any]) -> Script:
        return tokens(2, first_s=0.2 if server.open_now < 8 else 1.2, each_s=0.01)

    async with scripted_server(answer) as server, Client(server.url) as client:
        slo = "ttft=0.6,tpot=0.5,share=0.9"
        found = await find_goodput(prober(server, client, slo), begin=10.0, precision=0.5)
    assert 10 <= found.rate < found.failed_at <= 160
    failed = [probe for probe in found.probes if not probe.passed]
    assert all(probe.stopped_early for probe in failed), "it is not waited for what is hopeless"
    assert max(probe.seconds for probe in failed) < 3.0


async def test_probe_of_a_server_that_hangs_ends_by_itself() -> None:
    async with (
        scripted_server(lambda body: tokens(1, first_s=30.0, each_s=0)) as server,
        Client(server.url) as client,
    ):
        one = prober(server, client, "ttft=0.2,tpot=0.1,share=0.5")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("epd_bench.probing.SETTLE_S", 0.0)
            began = time.monotonic()
            with pytest.raises(NoRateError):
                await find_goodput(one, begin=20.0, least=10.0)
    assert time.monotonic() - began < 5.0
    assert one.sent >= 10


async def test_slo_that_nothing_keeps_is_said_before_the_search() -> None:
    async with (
        scripted_server(lambda body: tokens(2, first_s=0.05, each_s=0)) as server,
        Client(server.url) as client,
    ):
        with pytest.raises(
            BenchError, match=r"each alone, none kept it; the best one with 1 images"
        ):
            await prober(server, client, "ttft=0.01,tpot=0.1").check()
        assert len(server.bodies) == 5
