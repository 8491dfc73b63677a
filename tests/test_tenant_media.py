"""One tenant cannot fill the media store: through the gateway, with all that it may put there."""

from __future__ import annotations

import asyncio
import contextlib
import io
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from epd_common.api_keys import ApiKey, hash_key
from epd_common.orders import BODY_MARGIN_S
from fake_engine import answer_text
from media_account import Tenant
from service_stack import CHAT, ServiceStack, bare_stack, eventually, picture, text_of

pytestmark = pytest.mark.slow  # services of their own

BOUND = 200_000
LARGE = "x" * (2 << 20)
"""A text too large for a message."""


def noise(side: int = 100) -> bytes:
    """A picture of some 30 KB that nobody else has."""
    buffer = io.BytesIO()
    Image.frombytes("RGB", (side, side), secrets.token_bytes(3 * side * side)).save(buffer, "PNG")
    return buffer.getvalue()


class Tenants:
    """A stack that two tenants use, whose accounts nobody else's tests touch."""

    def __init__(self, stack: ServiceStack, one: Tenant, other: Tenant) -> None:
        self.stack = stack
        self.one = one
        self.other = other

    def by(self, tenant: Tenant) -> dict[str, str]:
        return {"authorization": f"Bearer {tenant.name}"}

    async def ask(
        self, tenant: Tenant, text: str, *pictures: bytes, **headers: str
    ) -> httpx.Response:
        body = self.stack.body(text, *pictures)
        return await self.stack.http.post(CHAT, json=body, headers=self.by(tenant) | headers)

    async def upload(self, tenant: Tenant, data: bytes) -> httpx.Response:
        form: dict[str, Any] = {"data": {"purpose": "vision"}, "files": {"file": ("a.png", data)}}
        return await self.stack.http.post("/v1/files", headers=self.by(tenant), **form)

    async def refusals(self, tenant: Tenant) -> float:
        metrics = (await self.stack.http.get("/metrics")).text
        name = f'epd_gateway_media_refused_total{{tenant="{tenant.name}"}} '
        return sum(
            float(line.removeprefix(name)) for line in metrics.splitlines() if line.startswith(name)
        )

    async def check_the_other_is_served(self) -> None:
        data = noise()
        assert text_of(await self.ask(self.other, "mine", data)) == answer_text("mine", data)
        assert (await self.upload(self.other, data)).status_code == 200


@contextlib.asynccontextmanager
async def opened(
    nats_url: str,
    redis_url: str,
    folder: Path,
    *,
    cache_scope: Any = None,
    bound: int = BOUND,
) -> AsyncIterator[Tenants]:
    async with bare_stack(nats_url, redis_url, folder) as stack:
        one, other = Tenant(stack.redis), Tenant(stack.redis)
        keys = tuple(
            ApiKey(hash=hash_key(each.name.encode()), tenant=each.name, cache_scope=cache_scope)
            for each in (one, other)
        )
        await stack.add_encoder()
        await stack.add_pd()
        # The door has room for all that the store might take.
        await stack.add_gateway(api_keys=keys, tenant_media_bytes=bound, admission_capacity=1 << 30)
        tenants = Tenants(stack, one, other)
        stack.http.headers.update(tenants.by(one))
        await stack.ready()
        yield tenants


@pytest.fixture(params=[None, "shared"])
async def tenants(
    nats_url: str, redis_url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Tenants]:
    """Where embeddings are shared by all, media are charged to each all the same."""
    async with opened(nats_url, redis_url, tmp_path, cache_scope=request.param) as running:
        yield running


def check_refused(answer: httpx.Response, status: int = 429) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["stage"]) == ("tenant_over_media_bytes", "ingest")
    if status == 429:
        assert 1 <= int(answer.headers["retry-after"]) <= 60


async def test_a_tenant_fills_its_bound_by_uploads(tenants: Tenants) -> None:
    taken = []
    for _ in range(20):
        data = noise()
        answer = await tenants.upload(tenants.one, data)
        if answer.status_code != 200:
            break
        taken.append(answer.json()["id"])
    check_refused(answer)
    assert 5 <= len(taken) <= 6
    assert BOUND - 40_000 < await tenants.one.sum() <= BOUND
    assert await tenants.refusals(tenants.one) == 1
    check_refused(await tenants.ask(tenants.one, "inline", data))
    assert text_of(await tenants.ask(tenants.one, "text")) == "text"
    await tenants.check_the_other_is_served()

    # What it has it goes on using, and is charged for that as long as it does.
    part = {"type": "image_file", "image_file": {"file_id": taken[0]}}
    asked = tenants.stack.body("mine")
    asked["messages"][0]["content"].insert(0, part)
    for look in (
        lambda: tenants.stack.http.get(f"/v1/files/{taken[0]}"),
        lambda: tenants.stack.http.get(f"/v1/files/{taken[0]}/content"),
        lambda: tenants.stack.http.post(CHAT, json=asked),
    ):
        ends = await tenants.one.true_ends()
        for name in ends:
            await tenants.one.age(name, 20_000)
        assert (await look()).status_code == 200
        renewed = [
            name
            for name, end in (await tenants.one.true_ends()).items()
            if end > max(ends.values())
        ]
        assert len(renewed) == 2, "the file's record and its bytes"
    before = await tenants.one.sum()
    assert (await tenants.stack.http.delete(f"/v1/files/{taken[0]}")).status_code == 200
    assert before - 3000 < await tenants.one.sum() < before, "its bytes stay until their end"


async def test_a_tenant_fills_its_bound_by_pictures_in_requests(tenants: Tenants) -> None:
    pictures = [noise() for _ in range(5)]
    answer = await tenants.ask(tenants.one, "five", *pictures)
    assert text_of(answer) == answer_text("five", *pictures)
    check_refused(await tenants.ask(tenants.one, "more", *(noise() for _ in range(5))))
    assert await tenants.refusals(tenants.one) >= 1
    await tenants.check_the_other_is_served()
    again = await tenants.ask(tenants.one, "again", *pictures)
    assert text_of(again) == answer_text("again", *pictures)
    assert await tenants.one.true_ends(), "also now that encoders have read them"


async def test_what_alone_is_beyond_the_bound(tenants: Tenants) -> None:
    large = noise(300)
    assert len(large) > BOUND
    check_refused(await tenants.upload(tenants.one, large), 413)
    check_refused(await tenants.ask(tenants.one, "large", picture(), large), 413)
    check_refused(await tenants.ask(tenants.one, LARGE), 413)


async def test_a_tenant_fills_its_bound_by_large_bodies(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with opened(nats_url, redis_url, tmp_path, bound=5 << 20) as tenants:
        stack, engine = tenants.stack, tenants.stack.pds[0].engine
        engine.gate.clear()
        limit = {"x-epd-deadline-s": "20"}
        running = [asyncio.create_task(tenants.ask(tenants.one, LARGE, **limit)) for _ in range(2)]
        await eventually(lambda: len(engine.running) == 2, "both run")
        bodies = await tenants.one.true_ends()
        assert len(bodies) == 2
        for name in bodies:
            assert name.startswith("epd:v1:body:")
            assert await stack.redis.pttl(name) <= 1000 * (20 + BODY_MARGIN_S)
        data = picture()
        check_refused(await tenants.ask(tenants.one, LARGE, data))
        engine.gate.set()
        await tenants.check_the_other_is_served()
        assert text_of(await tenants.ask(tenants.other, LARGE)) == LARGE
        assert [text_of(answer) for answer in await asyncio.gather(*running)] == [LARGE, LARGE]

        async def given_back() -> bool:
            return not await stack.redis.exists(*bodies)

        await eventually(given_back, "bodies go with their requests")
        assert text_of(await tenants.ask(tenants.one, LARGE, data)) == answer_text(LARGE, data)
        left = await tenants.one.true_ends()
        assert [name.rpartition(":")[0] for name in left] == ["epd:v1:media"]


async def test_a_large_body_goes_with_a_client_that_goes(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with opened(nats_url, redis_url, tmp_path, bound=5 << 20) as tenants:
        engine = tenants.stack.pds[0].engine
        engine.gate.clear()
        asking = asyncio.create_task(tenants.ask(tenants.one, LARGE))
        await eventually(lambda: len(engine.running) == 1, "it runs")
        assert await tenants.one.sum() > len(LARGE)
        asking.cancel()

        async def given_back() -> bool:
            return await tenants.one.sum() == 0

        await eventually(given_back, "nothing is charged")
        engine.gate.set()


async def test_without_keys_nobody_is_bounded(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with bare_stack(nats_url, redis_url, tmp_path) as stack:
        await stack.add_encoder()
        await stack.add_pd()
        await stack.add_gateway(tenant_media_bytes=1)
        await stack.ready()
        data = noise()
        assert text_of(await stack.ask("x", data)) == answer_text("x", data)
        form: dict[str, Any] = {"data": {"purpose": "vision"}, "files": {"file": ("a.png", data)}}
        assert (await stack.http.post("/v1/files", **form)).status_code == 200
        assert text_of(await stack.ask(LARGE)) == LARGE
        assert not await stack.redis.exists("epd:v1:held::ends", "epd:v1:held::sizes")
