"""Cancellation reaches every stage within a second (invariant I11), on simulated engines and real brokers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
from collections.abc import AsyncIterator

import httpx
import pytest
from nats.aio.msg import Msg

from direct import Inbox, direct_job, publish
from epd_cli.cancel import ask, cancel
from epd_common.bus import Bus
from epd_common.errors import BadRequestError
from epd_common.orders import OrderContext, Orders
from epd_common.protocol import Cancel, EmbeddingEvent, Item, Media, encode, subjects
from epd_common.store import Claim, KeyStates, MediaStore
from epd_sim.answers import expected_answer
from leftovers import leftovers, queued, request_ids, waiting
from service_stack import BOUND_S, broken_part, eventually, picture, text_of
from sim_stack import SimStack, sim_stack

WITHIN_S = 1.0  # invariant I11


@pytest.fixture(scope="module")
async def shared(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SimStack]:
    """Workers that do one thing at a time, so that what else comes is queued."""
    folder = tmp_path_factory.mktemp("cancellation")
    async with sim_stack(nats_url, redis_url, folder) as made:
        await made.add_encoder(encoder_slots=1)
        await made.add_pd(pd_slots=2)
        await made.start(encoders=0, pds=0)
        yield made


@pytest.fixture
async def stack(shared: SimStack) -> AsyncIterator[SimStack]:
    yield shared
    shared.encoder_time.passing.set()
    shared.pd_time.passing.set()

    async def clean() -> bool:
        return await leftovers(shared) == {}

    await eventually(clean, "nothing is left behind")


async def gone(task: asyncio.Task[httpx.Response]) -> None:
    """The client goes away."""
    task.cancel()
    await asyncio.wait((task,))


async def asked_rightly(stack: SimStack, text: str, *pictures: bytes) -> httpx.Response:
    response = await stack.ask(text, *pictures)
    assert text_of(response) == expected_answer(stack.body(text, *pictures), pictures)
    return response


async def in_engine(stack: SimStack, text: str) -> asyncio.Task[httpx.Response]:
    """A request that the held engine works on."""
    stack.pd_time.passing.clear()
    before = len(stack.pds[0].engine._inside)
    asking = asyncio.create_task(asked_rightly(stack, text))
    await eventually(lambda: len(stack.pds[0].engine._inside) > before, "the engine has it")
    return asking


async def until_queued(stack: SimStack, stage: str, count: int) -> float:
    async def there() -> bool:
        return await queued(stack, stage) == count

    return await eventually(there, f"{count} jobs in {stage}")


# -- the queue --------------------------------------------------------------------------------------


async def test_a_queued_request_leaves_the_queue_with_its_client(stack: SimStack) -> None:
    running = [await in_engine(stack, "one"), await in_engine(stack, "two")]
    asking = asyncio.create_task(stack.ask("three"))
    await until_queued(stack, "generate", 3)
    before = await stack.counters(stack.pds[0])
    await gone(asking)
    assert await until_queued(stack, "generate", 2) < WITHIN_S
    stack.pd_time.passing.set()
    await asyncio.gather(*running)
    after = await stack.counters(stack.pds[0])
    assert after.get("cancelled", 0) == before.get("cancelled", 0), "it never came"


@pytest.mark.slow
async def test_a_queued_job_whose_cancel_a_new_worker_did_not_hear(stack: SimStack) -> None:
    running = [await in_engine(stack, "one"), await in_engine(stack, "two")]
    inbox = await Inbox().listen(stack.bus)
    job = direct_job(stack, inbox)
    await publish(stack, "generate", encode(job))
    await stack.bus.emit(subjects.cancel_subject(job.request_id), Cancel(request_id=job.request_id))

    async def written() -> bool:
        return bool(await stack.redis.exists(f"epd:v1:cancelled:{job.request_id}"))

    await eventually(written, "the cancel is written down")
    assert 0 < await stack.redis.ttl(f"epd:v1:cancelled:{job.request_id}") <= 600
    late = await stack.add_pd()
    assert (await inbox.error()).code == "cancelled"
    assert (await stack.counters(late))["cancelled"] == 1
    assert not late.engine._inside
    await late.process.stop()
    stack.pds.remove(late)
    stack.pd_time.passing.set()
    await asyncio.gather(*running)


# -- epd cancel -------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_who_cancels_is_told_who_had_the_request(stack: SimStack) -> None:
    stack.pd_time.passing.clear()
    running = asyncio.create_task(stack.ask("runs"))
    others = [await in_engine(stack, "other")]
    queued_up = asyncio.create_task(stack.ask("queued"))
    await until_queued(stack, "generate", 3)
    ids = await request_ids(stack)
    gateway, pd = f"gateway {stack.gateway_id}", f"pd {stack.pds[0].id}"
    had = await ask(stack.bus, [ids[0], ids[2], "nobodys"])
    assert had == {ids[0]: {gateway, pd}, ids[2]: {gateway}, "nobodys": set()}
    for task in (running, queued_up):
        response = await task
        assert response.status_code == 499
        assert response.json()["error"]["code"] == "cancelled"
    await until_queued(stack, "generate", 1)
    stack.pd_time.passing.set()
    await asyncio.gather(*others)


@pytest.mark.slow
async def test_a_stream_that_is_cancelled_ends_with_the_error(stack: SimStack) -> None:
    async with stack.streaming("goes on", max_tokens=30_000, ignore_eos=True) as response:
        pieces = response.aiter_text()
        text = await anext(pieces)
        stack.pd_time.passing.clear()
        (request_id,) = await request_ids(stack)
        assert (await ask(stack.bus, [request_id]))[request_id]
        text += "".join([piece async for piece in pieces])
    *_, error, end = [event for event in text.split("\n\n") if event]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "cancelled"
    assert end == "data: [DONE]"


@pytest.mark.slow
async def test_the_command_and_its_exit_code(
    stack: SimStack, nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.pd_time.passing.clear()
    asking = asyncio.create_task(stack.ask("runs"))
    await until_queued(stack, "generate", 1)
    (request_id,) = await request_ids(stack)
    assert await cancel(nats_url, [request_id]) == 0
    assert f"{request_id}: cancelled at gateway {stack.gateway_id}" in capsys.readouterr().out
    assert (await asking).status_code == 499
    assert await cancel(nats_url, [request_id]) == 1
    assert f"{request_id}: nobody has it" in capsys.readouterr().err
    with pytest.raises(BadRequestError, match="cannot be a request's id"):
        await cancel(nats_url, ["*"])
    command = [sys.executable, "-m", "epd_cli", "cancel", "--nats", nats_url, "unknown"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(BOUND_S):
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert b"nobody has it" in errors


@pytest.mark.parametrize("reply", ["epd.v1.encode.m.l0", "$JS.API.STREAM.PURGE.EPD_GENERATE"])
async def test_a_cancel_makes_nobody_publish_elsewhere(stack: SimStack, reply: str) -> None:
    heard: list[str] = []

    async def note(message: Msg) -> None:
        heard.append(message.subject)

    subscription = await stack.bus.subscribe(reply, note)
    asking = await in_engine(stack, "runs")
    (request_id,) = await request_ids(stack)
    message = encode(Cancel(request_id=request_id))
    await stack.bus.emit_bytes(subjects.cancel_subject(request_id), message, reply=reply)
    with contextlib.suppress(AssertionError):  # it is answered with 499
        await asking
    await until_queued(stack, "generate", 0)
    await stack.bus.flush()
    await subscription.unsubscribe()
    assert heard == []


# -- encode jobs ------------------------------------------------------------------------------------


async def behind_another(stack: SimStack) -> asyncio.Task[httpx.Response]:
    """Keep the one slot of the encoder busy."""
    stack.encoder_time.passing.clear()
    tower = stack.encoders[0].engine._tower
    asking = asyncio.create_task(asked_rightly(stack, "before", picture()))
    await eventually(lambda: bool(tower._batch), "the encoder is busy")
    return asking


async def test_fc35_an_encode_that_nobody_waits_for_leaves_its_queue_and_is_ordered_anew(
    stack: SimStack,
) -> None:
    first, data = await behind_another(stack), picture()
    before = await stack.counters(stack.encoders[0])
    asking = asyncio.create_task(stack.ask("never mind", data))
    await until_queued(stack, "encode", 2)
    await gone(asking)

    assert await until_queued(stack, "encode", 1) < WITHIN_S, "the encoder is busy all the while"
    assert await waiting(stack, [stack.key(data)]) == 0
    stack.encoder_time.passing.set()
    await first
    await until_queued(stack, "encode", 0)
    after = await stack.counters(stack.encoders[0])
    assert after["encoded"] == before.get("encoded", 0) + 1, "that before it alone"
    response = await asked_rightly(stack, "after all", data)
    assert response.headers["x-epd-items"] == "encoded"


@pytest.mark.parametrize("joins", ["before", "after"])
async def test_who_shares_an_encode_gets_it_when_the_first_one_goes(
    stack: SimStack, joins: str
) -> None:
    first, data = await behind_another(stack), picture()
    leaving = asyncio.create_task(stack.ask("never mind", data))
    await until_queued(stack, "encode", 2)
    if joins == "after":
        await gone(leaving)
        await until_queued(stack, "generate", 1)
    staying = asyncio.create_task(asked_rightly(stack, "stays", data))

    async def both_wait() -> bool:
        return await waiting(stack, [stack.key(data)]) == (2 if joins == "before" else 1)

    await eventually(both_wait, "who stays waits")
    if joins == "before":
        await gone(leaving)
    stack.encoder_time.passing.set()
    response = await staying
    origin = "shared" if joins == "before" else "encoded"  # with a job that is its own now
    assert response.headers["x-epd-items"] == origin
    await first
    assert (await stack.counters(stack.encoders[0])).get("unwanted", 0) == 0


async def test_an_upload_is_encoded_whoever_asks_and_goes(stack: SimStack) -> None:
    first, data = await behind_another(stack), picture()
    asking = asyncio.create_task(stack.ask("never mind", data))
    await until_queued(stack, "encode", 2)
    uploaded = await stack.http.post(
        "/v1/files", data={"purpose": "vision"}, files={"file": ("a.png", data)}
    )
    assert uploaded.status_code == 200
    await gone(asking)
    await until_queued(stack, "generate", 1)
    stack.encoder_time.passing.set()
    await first

    async def ready() -> bool:
        return await stack.redis.hget(f"epd:v1:state:{stack.key(data)}", "state") == b"ready"

    await eventually(ready, "it is encoded")
    assert await waiting(stack, [stack.key(data)]) == 0


async def test_fc38_when_one_item_fails_its_siblings_are_let_go(stack: SimStack) -> None:
    """The failure is told while the others still wait in the queue (field case 38)."""
    bad, good = picture(), picture()
    states = KeyStates(stack.redis, lease_s=60, ready_ttl_s=60)
    (claim,) = await states.claim([stack.key(bad)])  # somebody else's encode, which is to fail
    first = await behind_another(stack)
    before = await stack.counters(stack.encoders[0])
    asking = asyncio.create_task(stack.ask("two", bad, good))
    await until_queued(stack, "encode", 2)

    async def pulled() -> bool:
        return await stack.busy(stack.pds[0]) == 2

    await eventually(pulled, "it waits for both")
    await _refuse(stack, states, stack.key(bad), claim)
    assert (await asking).status_code == 400

    assert await until_queued(stack, "encode", 1) < WITHIN_S, "the encoder is busy all the while"
    assert await waiting(stack, [stack.key(good)]) == 0
    stack.encoder_time.passing.set()
    await first
    await until_queued(stack, "encode", 0)
    after = await stack.counters(stack.encoders[0])
    assert after["encoded"] == before.get("encoded", 0) + 1, "that before them alone"


async def _refuse(stack: SimStack, states: KeyStates, key: str, claim: Claim) -> None:
    event = EmbeddingEvent(
        key=key, epoch=claim.epoch, state="failed", status=400, code="no", reason="no"
    )
    assert await states.finish(event)
    await stack.bus.emit(subjects.ready_subject(key), event)


async def test_a_direct_job_lets_go_of_its_raw_items(stack: SimStack) -> None:
    """Whose keys are known only once it is prepared."""
    first, data = await behind_another(stack), picture()
    content = [{"type": "media_ref", "item": 0}, {"type": "text", "text": "direct"}]
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    inbox = await Inbox().listen(stack.bus)
    job = direct_job(stack, inbox, body=body, items=[Item(media=Media(inline=data))])
    await publish(stack, "generate", encode(job))
    await until_queued(stack, "encode", 2)
    assert await waiting(stack, [stack.key(data)]) == 1
    message = Cancel(request_id=job.request_id)
    await stack.bus.emit(subjects.cancel_subject(job.request_id), message)
    assert (await inbox.error()).code == "cancelled"

    async def no_marks() -> bool:
        return await waiting(stack, [stack.key(data)]) == 0

    assert await eventually(no_marks, "it waits no longer") < WITHIN_S
    stack.encoder_time.passing.set()
    await first


async def test_a_request_that_is_refused_leaves_no_marks(stack: SimStack) -> None:
    data = picture()
    body = stack.body("x", data)
    body["messages"][0]["content"].append(broken_part())
    assert (await stack.http.post("/v1/chat/completions", json=body)).status_code == 400
    assert await waiting(stack, [stack.key(data)]) == 0


# -- claims that are cut short ----------------------------------------------------------------------


class SlowStates(KeyStates):
    """Claims, and is slow to say so."""

    def __init__(self, stack: SimStack) -> None:
        super().__init__(stack.redis, lease_s=60, ready_ttl_s=60)
        self.claimed = asyncio.Event()
        self.go_on = asyncio.Event()

    async def claim(self, *args: object, **more: object) -> list[Claim]:
        claims = await super().claim(*args, **more)  # type: ignore[arg-type]
        self.claimed.set()
        await self.go_on.wait()
        return claims


async def test_a_claim_that_is_cut_short_is_given_back(stack: SimStack) -> None:
    """Else its key would wait for the end of its lease, with no job for it."""
    states, key = SlowStates(stack), secrets.token_hex(32)
    orders = Orders(stack.bus, states, MediaStore(stack.redis, ttl_s=60))
    item = Item(media=Media(ref="r"), key=key)
    context = OrderContext(model="m", fingerprint="f", request_id="r")
    claiming = asyncio.create_task(orders.claim([item], context))
    await states.claimed.wait()
    claiming.cancel()
    await asyncio.sleep(0)
    states.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await claiming
    assert await states.read([key]) == [None]


async def test_a_client_that_goes_while_its_request_is_submitted(
    stack: SimStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is submitted whole, and then taken back whole."""
    stored, go_on = asyncio.Event(), asyncio.Event()
    store = Bus.store

    async def slow(*args: object, **more: object) -> int:
        number = await store(*args, **more)  # type: ignore[arg-type]
        stored.set()
        await go_on.wait()
        return number

    running = [await in_engine(stack, "one"), await in_engine(stack, "two")]
    monkeypatch.setattr(Bus, "store", slow)
    data = picture()
    asking = asyncio.create_task(stack.ask("three", data))
    await stored.wait()
    await gone(asking)
    go_on.set()
    monkeypatch.undo()
    await until_queued(stack, "generate", 2)

    async def nobody_waits() -> bool:  # its marks go after its job
        return await waiting(stack, [stack.key(data)]) == 0

    await eventually(nobody_waits, "nobody waits for its picture")
    stack.pd_time.passing.set()
    await asyncio.gather(*running)
