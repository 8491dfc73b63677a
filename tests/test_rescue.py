"""Items that do not come: who encodes them then, in which order, and how their requests end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from epd_pd.rescue import Found, RescuePolicy, Situation, Step
from fake_engine import answer_text
from service_stack import ServiceStack, bare_stack, eventually, picture, text_of

POLICY = RescuePolicy(attempts=3, patience_s=2.0, deadline_s=10.0, encodes_here=True)
HELPLESS = replace(POLICY, encodes_here=False)
NOW = Situation(
    found="pending",
    orders=1,
    waited_s=0.5,
    total_s=0.5,
    encoders=True,
    taken_over=False,
    tried_here=False,
)


@pytest.mark.parametrize(
    ("policy", "changes", "step"),
    [
        (POLICY, {}, Step.WAIT),
        (POLICY, {"waited_s": 2.0}, Step.ENCODE_HERE),
        (POLICY, {"encoders": False}, Step.ENCODE_HERE),
        (POLICY, {"encoders": False, "tried_here": True}, Step.WAIT),
        (POLICY, {"encoders": False, "taken_over": True}, Step.WAIT),
        (POLICY, {"encoders": False, "taken_over": True, "waited_s": 2.0}, Step.ENCODE_HERE),
        (POLICY, {"encoders": False, "found": "lost"}, Step.ENCODE_HERE),
        (POLICY, {"waited_s": 9.0, "tried_here": True}, Step.WAIT),
        (HELPLESS, {"waited_s": 9.0, "encoders": False}, Step.WAIT),
        (HELPLESS, {"total_s": 10.0}, Step.GIVE_UP),
        (POLICY, {"total_s": 10.0, "waited_s": 9.0}, Step.GIVE_UP),
        (POLICY, {"found": "refused"}, Step.GIVE_UP),
        (POLICY, {"found": "failed"}, Step.ENCODE_HERE),
        (POLICY, {"found": "failed", "tried_here": True}, Step.ORDER),
        (POLICY, {"found": "failed", "tried_here": True, "orders": 3}, Step.GIVE_UP),
        (HELPLESS, {"found": "failed"}, Step.ORDER),
        (HELPLESS, {"found": "failed", "orders": 3}, Step.GIVE_UP),
        (POLICY, {"found": "lost"}, Step.ORDER),
        (POLICY, {"found": "lost", "orders": 3}, Step.ENCODE_HERE),
        (HELPLESS, {"found": "lost", "orders": 3}, Step.GIVE_UP),
    ],
)
def test_policy(policy: RescuePolicy, changes: dict[str, Any], step: Step) -> None:
    assert policy.next(replace(NOW, **changes)) is step


def test_policy_is_asked_again_when_it_may_say_something_else() -> None:
    assert POLICY.look_again_s(NOW) == pytest.approx(1.5)
    assert POLICY.look_again_s(replace(NOW, tried_here=True)) == pytest.approx(9.5)
    assert HELPLESS.look_again_s(NOW) == pytest.approx(9.5)
    assert HELPLESS.look_again_s(replace(NOW, total_s=11.0)) == 0.0


@pytest.mark.parametrize("found", ["pending", "lost", "failed", "refused"])
def test_every_item_comes_to_an_end(found: Found) -> None:
    """However an item goes wrong, steps that change nothing are followed by giving up."""
    now = replace(NOW, found=found)
    for _ in range(20):
        step = POLICY.next(now)
        if step is Step.GIVE_UP:
            return
        now = replace(
            now,
            orders=now.orders + (step is Step.ORDER),
            tried_here=now.tried_here or step is Step.ENCODE_HERE,
            waited_s=now.waited_s + 1,
            total_s=now.total_s + 1,
        )
    raise AssertionError(f"still {step}")


@pytest.fixture
async def bare(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[ServiceStack]:
    async with bare_stack(nats_url, redis_url, tmp_path) as stack:
        yield stack


async def test_fc12_one_process_that_encodes_and_decodes(bare: ServiceStack) -> None:
    pd = await bare.add_pd(ec_role="ec_both")
    await bare.add_gateway()
    await bare.ready()
    one, two = picture(), picture()
    assert text_of(await bare.ask("x", one, two)) == answer_text("x", one, two)
    counters = await bare.counters(pd)
    assert counters["encoded"] == 2
    assert "encoded_here" not in counters  # it took the jobs from the queue, as an encoder does
    assert (await bare.http.get("/ready")).status_code == 200


async def test_encoders_and_both_share_the_queue(bare: ServiceStack) -> None:
    pd, encoder = await bare.add_pd(ec_role="ec_both"), await bare.add_encoder()
    await bare.add_gateway()
    await bare.ready()
    encoder.engine.gate.clear()
    pd.engine.tower.gate.clear()
    pictures = [picture() for _ in range(4)]
    asking = [asyncio.create_task(bare.ask("x", one)) for one in pictures]
    await eventually(
        lambda: len(encoder.engine.encoded) + len(pd.engine.tower.encoded) == 4, "all are begun"
    )
    encoder.engine.gate.set()
    pd.engine.tower.gate.set()
    for one, response in zip(pictures, await asyncio.gather(*asking), strict=True):
        assert text_of(response) == answer_text("x", one)


async def rescuing(stack: ServiceStack, *, encoders: int = 1, **settings: Any) -> Any:
    for _ in range(encoders):
        await stack.add_encoder()
    pd = await stack.add_pd(local_encode="always", **settings)
    await stack.add_gateway()
    await stack.ready()
    return pd


async def test_fc30_an_item_that_encoders_fail_is_encoded_here(
    bare: ServiceStack, caplog: pytest.LogCaptureFixture
) -> None:
    pd = await rescuing(bare)
    (encoder,) = bare.encoders
    encoder.engine.failures = 100
    one = picture()
    assert text_of(await bare.ask("x", one)) == answer_text("x", one)
    assert len(encoder.engine.encoded) == 5  # the queue tried all its times before
    assert (await bare.counters(pd))["encoded_here"] == 1
    assert "encoding an item here: its embedding failed: the fake encoder fails" in caplog.text
    again = picture()
    encoder.engine.failures = 0
    assert text_of(await bare.ask("y", one, again)) == answer_text("y", one, again)
    assert len(pd.engine.tower.encoded) == 1


async def test_fc07_a_hanging_encoder_is_not_waited_for_beyond_patience(bare: ServiceStack) -> None:
    pd = await rescuing(bare, encode_patience_s=0.5)
    (encoder,) = bare.encoders
    encoder.engine.gate.clear()
    one = picture()
    assert text_of(await bare.ask("x", one)) == answer_text("x", one)
    assert (await bare.counters(pd))["encoded_here"] == 1
    encoder.engine.gate.set()  # its late result is of an epoch that is over

    async def told() -> bool:
        return (await bare.counters(encoder)).get("stale", 0) == 1

    await eventually(told, "the encoder learns that it was too late")
    assert text_of(await bare.ask("y", one)) == answer_text("y", one)
    assert len(encoder.engine.encoded) == len(pd.engine.tower.encoded) == 1


async def test_without_any_encoder_nobody_waits(bare: ServiceStack) -> None:
    pd = await rescuing(bare, encoders=0, encode_patience_s=60.0)
    assert (await bare.http.get("/ready")).status_code == 200
    one = picture()
    assert text_of(await bare.ask("x", one)) == answer_text("x", one)
    assert (await bare.counters(pd))["encoded_here"] == 1


async def test_one_of_two_that_wait_encodes(bare: ServiceStack) -> None:
    await rescuing(bare, encode_patience_s=0.3, recheck_s=0.1)
    await bare.add_pd(
        arena="another node", local_encode="always", encode_patience_s=0.3, recheck_s=0.1
    )
    await bare.ready()
    bare.encoders[0].engine.gate.clear()
    towers = [pd.engine.tower for pd in bare.pds]
    for tower in towers:
        tower.gate.clear()
    one = picture()
    asking = [asyncio.create_task(bare.ask(f"{n}", one)) for n in range(8)]
    await eventually(lambda: bool(towers[0].encoded or towers[1].encoded), "one began")
    await asyncio.sleep(0.15)  # within the patience that the new encode gets, too
    for engine in (*towers, bare.encoders[0].engine):
        engine.gate.set()
    for n, response in enumerate(await asyncio.gather(*asking)):
        assert text_of(response) == answer_text(f"{n}", one)
    assert len(towers[0].encoded) + len(towers[1].encoded) == 1


@pytest.mark.slow
async def test_of_many_that_wait_without_encoders_one_encodes(bare: ServiceStack) -> None:
    await rescuing(bare, encoders=0, recheck_s=0.05)
    await bare.add_pd(arena="another node", local_encode="always", recheck_s=0.05)
    await bare.ready()
    towers = [pd.engine.tower for pd in bare.pds]
    for tower in towers:
        tower.gate.clear()
    one = picture()
    first = [asyncio.create_task(bare.ask(f"{n}", one)) for n in range(16)]
    await eventually(lambda: bool(towers[0].encoded or towers[1].encoded), "one began")
    later = [asyncio.create_task(bare.ask(f"{n}", one)) for n in range(16, 32)]
    await asyncio.sleep(0.3)  # several looks of each at the state
    for tower in towers:
        tower.gate.set()
    for n, response in enumerate(await asyncio.gather(*first, *later)):
        assert text_of(response) == answer_text(f"{n}", one)
    assert len(towers[0].encoded) + len(towers[1].encoded) == 1
    taken = [(await bare.counters(pd)).get("encoded_here", 0) for pd in bare.pds]
    assert sum(taken) == 1


async def test_a_rescue_that_hangs_ends_by_the_items_deadline(bare: ServiceStack) -> None:
    pd = await rescuing(bare, encoders=0, encode_deadline_s=0.6)
    pd.engine.tower.gate.clear()
    one = picture()
    response = await bare.ask("x", one)
    assert response.status_code == 504
    assert response.json()["error"]["key"] == bare.key(one)
    pd.engine.tower.gate.set()
    again = picture()
    assert text_of(await bare.ask("y", again)) == answer_text("y", again)


async def test_an_item_that_ends_processes_is_given_up(bare: ServiceStack) -> None:
    """Beginnings without an end are left by processes that were killed. To ask does not renew their time."""
    await rescuing(bare)
    (encoder,) = bare.encoders
    one = picture()
    name = f"epd:v1:begun:{bare.key(one)}:alone"
    await bare.redis.set(name, 2, ex=300)
    response = await bare.ask("x", one)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "media_kills_engine"
    assert encoder.engine.encoded == bare.pds[0].engine.tower.encoded == []
    assert await bare.redis.ttl(name) <= 300 and int(await bare.redis.get(name)) == 2
    two = picture()
    assert text_of(await bare.ask("y", two)) == answer_text("y", two)
    assert await bare.redis.get(f"epd:v1:begun:{bare.key(two)}") is None


async def test_an_item_that_nobody_encodes_ends_its_request_with_504(bare: ServiceStack) -> None:
    encoder = await bare.add_encoder()
    pd = await bare.add_pd(encode_deadline_s=0.6)
    await bare.add_gateway()
    await bare.ready()
    encoder.engine.gate.clear()
    one = picture()
    response = await bare.ask("x", one)
    assert response.status_code == 504
    error = response.json()["error"]
    assert error["code"] == "deadline_exceeded"
    assert error["stage"] == "encode"
    assert error["key"] == bare.key(one)
    assert f"encoder {encoder.id} began it and has not finished" in error["message"]
    assert (await bare.counters(pd))["gave_up"] == 1
    assert text_of(await bare.ask("text")) == answer_text("text")
    encoder.engine.gate.set()


async def test_a_deadline_of_the_request_names_the_reason(bare: ServiceStack) -> None:
    encoder = await bare.add_encoder()
    await bare.add_pd()
    await bare.add_gateway()
    await bare.ready()
    encoder.engine.gate.clear()
    encoder.engine.sizes = False
    one = picture()
    response = await bare.http.post(
        "/v1/chat/completions", json=bare.body("x", one), headers={"x-epd-deadline-s": "0.5"}
    )
    assert response.status_code == 504
    assert "no encoder has begun it" in response.json()["error"]["message"]
    encoder.engine.gate.set()


async def test_fc30_when_all_fail_the_error_says_so(bare: ServiceStack) -> None:
    pd = await rescuing(bare, encode_attempts=1)
    bare.encoders[0].engine.failures = 100
    pd.engine.tower.failures = 100
    response = await bare.ask("x", picture())
    assert response.status_code == 502
    error = response.json()["error"]
    assert error["code"] == "encode_failed"
    assert "in 1 attempts nor by this worker: its embedding failed" in error["message"]
    assert (await bare.counters(pd))["gave_up"] == 1


async def test_a_refused_picture_is_nobody_elses_to_try(bare: ServiceStack) -> None:
    pd = await rescuing(bare)
    refused = picture()
    bare.encoders[0].engine.refuse = refused
    assert (await bare.ask("x", refused)).status_code == 400
    assert pd.engine.tower.encoded == []


async def test_cancelled_while_it_encodes_here(bare: ServiceStack) -> None:
    pd = await rescuing(bare, encoders=0)
    pd.engine.tower.gate.clear()
    one = picture()
    asking = asyncio.create_task(bare.ask("x", one))
    await eventually(lambda: bool(pd.engine.tower.encoded), "it encodes")
    asking.cancel()

    async def idle() -> bool:
        return await bare.busy(pd) == 0

    await eventually(idle, "the request is gone")
    pd.engine.tower.gate.set()
    assert text_of(await bare.ask("y", one)) == answer_text("y", one)
