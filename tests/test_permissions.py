"""Each role's rights on NATS and Valkey: enough for everything it does, and for nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client as NatsClient
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from direct import direct_job
from epd_cli.brokers import Brokers, NatsBroker, ValkeyBroker, embedded_brokers
from epd_cli.connect import operator_client
from epd_cli.nats_users import NATS_ROLES
from epd_cli.status import status
from epd_common.api_keys import ApiKey, hash_key
from epd_common.bus import Bus
from epd_common.bus.queues import places_with_jobs
from epd_common.health import ask_health
from epd_common.protocol import Item, Media, ReplyData, ReplyEnd, decode_reply, encode, subjects
from epd_common.protocol.keys import digest
from fake_engine import answer_text
from service_stack import ServiceStack, bare_stack, eventually, picture, stream_text, text_of

pytestmark = pytest.mark.slow  # many brokers or processes of its own

BOUND_S = 10.0
ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
EXAMPLE = ROOT / "docs" / "examples" / "direct_nats.py"


@pytest.fixture(scope="module")
async def own(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Brokers]:
    """Brokers on which the services have made the streams themselves, with the rights of their roles."""
    async with embedded_brokers(tmp_path_factory.mktemp("own")) as running:
        yield running


@pytest.fixture
async def stack(own: Brokers, tmp_path: Path) -> AsyncIterator[ServiceStack]:
    async with bare_stack(own.nats_url, own.redis_url, tmp_path, by_role=own) as running:
        await running.add_encoder()
        await running.add_pd()
        await running.add_gateway(placement="prefix")
        await running.ready()
        yield running


@contextlib.asynccontextmanager
async def as_role(
    own: Brokers, role: str, refused: list[str] | None = None
) -> AsyncIterator[NatsClient]:
    """A connection with a role's rights; what the server refuses it is noted."""

    async def note(error: Exception) -> None:
        if refused is not None:
            refused.append(str(error))

    prefix = "_INBOX.client" if role == "client" else subjects.inbox_prefix(role)
    client = await nats.connect(
        own.nats.url_for(role), inbox_prefix=prefix, allow_reconnect=False, error_cb=note
    )
    try:
        yield client
    finally:
        await client.close()


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if "ermission" in text or "NOPERM" in text]


# -- everything works -------------------------------------------------------------------------------


async def test_requests_files_and_cancels_work_and_nothing_is_refused(
    stack: ServiceStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one, two = picture(), picture()
    assert text_of(await stack.ask("hello", one, two)) == answer_text("hello", one, two)
    async with stack.streaming("again", one) as response:
        assert response.headers["x-epd-items"] == "reused"
        assert stream_text((await response.aread()).decode()) == answer_text("again", one)
    await stack.forget(one, redis=False)
    assert text_of(await stack.ask("from redis", one)) == answer_text("from redis", one)
    await stack.forget(two)
    assert text_of(await stack.ask("encoded anew", two)) == answer_text("encoded anew", two)
    large = "x" * (2 << 20)  # above the bus's limit: by the media store
    assert text_of(await stack.ask(large)) == large
    assert await stack.redis.keys("epd:v1:body:*") == [], "gone with its request"

    third = picture()
    made = await stack.http.post(
        "/v1/files", data={"purpose": "vision"}, files={"file": ("a.png", third)}
    )
    file_id = made.json()["id"]
    part = {"type": "image_file", "image_file": {"file_id": file_id}}
    asked = stack.body("file")
    asked["messages"][0]["content"].insert(0, part)
    answer = await stack.http.post("/v1/chat/completions", json=asked)
    assert text_of(answer) == answer_text("file", third)
    assert (await stack.http.get(f"/v1/files/{file_id}/content")).content == third
    assert (await stack.http.delete(f"/v1/files/{file_id}")).status_code == 200

    stack.pds[0].engine.kept.note(["a"], [])

    async def is_told() -> bool:
        return "epd_gateway_held_beginnings 1.0" in (await stack.http.get("/metrics")).text

    await eventually(is_told, "the gateway hears what is held")
    await stack.add_pd()
    await stack.ready()
    for pd in stack.pds:
        placed = subjects.generate_subject(stack.model, "l0", pd.id)
        await stack.bus.store(placed, direct_job(stack, ""), message_id=f"placed {pd.id}")
    gone = subjects.generate_subject(stack.model, "l0", "gone")
    await stack.bus.store(gone, direct_job(stack, ""), message_id="placed nowhere")

    async def all_done() -> bool:
        return await places_with_jobs(stack.bus, stack.model) == set()

    await eventually(all_done, "placed jobs are done, and those of a worker that is gone")
    assert text_of(await stack.ask("long " * 400)) == "long " * 400
    metrics = (await stack.http.get("/metrics")).text
    assert 'epd_gateway_placements_total{outcome="nearest"} 1.0' in metrics
    await stack.pds.pop().process.stop()

    engine = stack.pds[0].engine
    engine.gate.clear()
    asking = asyncio.create_task(stack.ask("never mind"))
    await eventually(lambda: bool(engine.running), "the engine works on it")
    asking.cancel()
    await eventually(lambda: not engine.running, "the cancel came through")
    engine.gate.set()
    metrics = (await stack.http.get("/metrics")).text
    assert "epd_gateway_ledger_reachable 1.0" in metrics, "the gateway may use the ledger"
    assert 'epd_gateway_queue_oldest_seconds{stage="encode"}' in metrics
    assert refusals(caplog) == []


async def test_quotas_of_tenants_work_and_nothing_is_refused(
    own: Brokers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    key = ApiKey(hash=hash_key(b"key"), tenant="of-rights")
    async with bare_stack(own.nats_url, own.redis_url, tmp_path, by_role=own) as stack:
        await stack.add_encoder()
        await stack.add_pd()
        for bound in (0, 10_000):  # the first one asks Valkey for its maxmemory
            await stack.add_gateway(api_keys=(key,), tenant_media_bytes=bound)
            stack.http.headers["authorization"] = "Bearer key"
            await stack.ready()
            data, large = picture(), "x" * (2 << 20)
            form: dict[str, Any] = {"data": {"purpose": "vision"}, "files": {"file": ("a", data)}}
            file = f"/v1/files/{(await stack.http.post('/v1/files', **form)).json()['id']}"
            assert (await stack.http.get(f"{file}/content")).content == data
            assert text_of(await stack.ask("again", data)) == answer_text("again", data)
            assert (await stack.http.delete(file)).status_code == 200
            status = (await stack.ask(large)).status_code
            assert status == (413 if bound else 200)
            assert await stack.redis.keys("epd:v1:body:*") == [], "gone with its request"
            account = "epd:v1:held:of-rights:ends"
            await stack.redis.zadd(account, {f"epd:v1:media:{digest(data)}": 1})
            other = picture()
            assert text_of(await stack.ask("one lapses", other)) == answer_text("one lapses", other)
            assert await stack.redis.zrange(account, 0, -1) == [
                f"epd:v1:media:{digest(other)}".encode()
            ]
            before = (await stack.redis.config_get("maxmemory"))["maxmemory"]
            await stack.redis.config_set("maxmemory", 1)
            try:
                assert (await stack.ask("no room", picture())).status_code == 503
            finally:
                await stack.redis.config_set("maxmemory", before)
            assert await stack.redis.zcard(account) == 1, "what found no room is not charged"
            await stack.redis.delete(account, "epd:v1:held:of-rights:sizes")
    assert refusals(caplog) == []


async def test_failures_and_rescue_work_and_nothing_is_refused(
    own: Brokers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with bare_stack(own.nats_url, own.redis_url, tmp_path, by_role=own) as stack:
        await stack.add_encoder()
        await stack.add_pd(local_encode="always", ec_role="ec_both")
        await stack.add_gateway()
        await stack.ready()
        broken, dying = picture(), picture()
        for engine in (stack.encoders[0].engine, stack.pds[0].engine.tower):
            engine.refuse = broken
        assert (await stack.ask("broken", broken)).status_code == 400
        stack.encoders[0].engine.failures = 9
        assert text_of(await stack.ask("rescued", dying)) == answer_text("rescued", dying)
        for stage in ("encode", "generate"):  # to the dead letters
            names = {"encode": subjects.encode_subject, "generate": subjects.generate_subject}
            await stack.bus.js.publish(names[stage](stack.model, "l0"), b"junk")

        async def all_dead() -> bool:
            return (await stack.bus.js.stream_info("EPD_DLQ")).state.messages >= 2

        await eventually(all_dead, "the dead letters")
    assert refusals(caplog) == []


async def test_a_client_asks_over_nats_alone(stack: ServiceStack, own: Brokers) -> None:
    data = picture()
    refused: list[str] = []
    async with as_role(own, "client", refused) as client:
        inbox = client.new_inbox()
        assert inbox.startswith("_INBOX.client.")
        frames = await client.subscribe(inbox)
        body = json.dumps(
            {"messages": [{"role": "user", "content": [{"type": "media_ref", "item": 0}]}]}
        ).encode()
        job = direct_job(stack, inbox, body=body, items=[Item(media=Media(inline=data))])
        await client.jetstream().publish(subjects.generate_subject(stack.model, "l0"), encode(job))
        found = b""
        while not isinstance(
            frame := decode_reply((await frames.next_msg(timeout=BOUND_S)).data), ReplyEnd
        ):
            found += frame.data if isinstance(frame, ReplyData) else b""
        text = json.loads(found)["choices"][0]["message"]["content"]
        assert text == answer_text("", data)
        registry = await client.jetstream().key_value("epd_workers")
        assert f"pd.{stack.pds[0].id}" in await registry.keys()
        assert (await registry.get(f"pd.{stack.pds[0].id}")).value
    assert refused == []


async def test_the_example_of_a_client_works_with_its_rights(
    stack: ServiceStack, own: Brokers, tmp_path: Path
) -> None:
    data = picture()
    (tmp_path / "picture.png").write_bytes(data)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(EXAMPLE), "--nats", own.nats.url_for("client")),
        *("--inbox-prefix", "_INBOX.client", "--timeout", "20"),
        *("--model", stack.model, "say it", str(tmp_path / "picture.png")),
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        out, _ = await process.communicate()
    assert (process.returncode, out.decode()) == (0, answer_text("say it", data) + "\n")


async def test_an_operator_sees_and_asks(
    stack: ServiceStack, own: Brokers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await status(own.nats.url_for("operator"), as_json=True) == 0
    assert stack.model in capsys.readouterr().out
    operator = Bus(own.nats.url_for("operator"), name="op", inbox=subjects.inbox_prefix("operator"))
    async with operator as bus:
        for worker in (stack.encoders[0].id, stack.pds[0].id, stack.gateway_id):
            assert (await ask_health(bus, worker))["ok"]
    data = picture()
    urls = own.nats.url_for("operator"), own.redis.url_for("operator")
    async with operator_client(*urls) as client:
        answer = await client.chat("direct", images=[data], model=stack.model)
    assert answer.text == answer_text("direct", data)


async def test_tools_with_their_usual_inboxes_are_answered(
    stack: ServiceStack, own: Brokers
) -> None:
    """``nats req epd.v1.health.WORKER`` with the address that `epd up` prints."""
    async with Bus(own.nats_url, name="nats") as bus:
        for worker in (stack.encoders[0].id, stack.pds[0].id, stack.gateway_id):
            assert (await ask_health(bus, worker))["ok"]


async def test_a_workers_health_check_works_with_its_rights(
    stack: ServiceStack, own: Brokers
) -> None:
    for role, worker in (("encoder", stack.encoders[0].id), ("pd", stack.pds[0].id)):
        bus = Bus(own.nats.url_for(role), name="check", inbox=subjects.inbox_prefix(role))
        async with bus:
            assert (await ask_health(bus, worker))["ok"]


# -- and nothing else -------------------------------------------------------------------------------

FORBIDDEN = {
    "gateway": (
        "epd.v1.ready.KEY",
        "epd.v1.held.w",
        "epd.v1.dlq.encode",
        "$KV.epd_workers.pd.one",
        "$JS.API.CONSUMER.MSG.NEXT.EPD_GENERATE.c",
        "$JS.API.CONSUMER.DURABLE.CREATE.EPD_GENERATE.c",
        "$JS.API.STREAM.DELETE.EPD_GENERATE",
        "$JS.API.STREAM.PURGE.EPD_GENERATE",
        "$JS.API.STREAM.MSG.GET.EPD_GENERATE",
        "_INBOX_pd.x",
        "_INBOX.client.x",
    ),
    "encoder": (
        "epd.v1.generate.m.l0.any",
        "epd.v1.encode.m.l0",
        "epd.v1.cancel.r",
        "epd.v1.held.w",
        "epd.v1.dlq.generate",
        "$KV.epd_workers.pd.one",
        "$KV.epd_workers.gateway.one",
        "$JS.API.STREAM.UPDATE.EPD_ENCODE",
        "$JS.API.STREAM.PURGE.EPD_ENCODE",
        "$JS.API.STREAM.MSG.GET.EPD_GENERATE",
        "$JS.API.CONSUMER.CREATE.EPD_ENCODE",
        "$JS.API.CONSUMER.DURABLE.CREATE.EPD_GENERATE.c",
        "$JS.API.CONSUMER.MSG.NEXT.EPD_GENERATE.c",
        "$JS.ACK.EPD_GENERATE.c.1.1.1.1.0",
        "_INBOX_gateway.x",
        "_INBOX.client.x",
    ),
    "pd": (
        "epd.v1.generate.m.l0.any",
        "epd.v1.cancel.r",
        "$KV.epd_workers.encoder.one",
        "$KV.epd_workers.gateway.one",
        "$JS.API.STREAM.UPDATE.EPD_GENERATE",
        "_INBOX_encoder.x",
    ),
    "client": (
        "epd.v1.ready.KEY",
        "epd.v1.held.w",
        "epd.v1.encode.m.l0",
        "epd.v1.dlq.encode",
        "epd.v1.health.w",
        "$KV.epd_workers.pd.one",
        "$KV.epd_workers.encoder.one",
        "$JS.API.STREAM.MSG.GET.EPD_GENERATE",
        "$JS.API.STREAM.MSG.DELETE.EPD_GENERATE",
        "$JS.API.CONSUMER.CREATE.EPD_GENERATE",
        "$JS.API.CONSUMER.MSG.NEXT.EPD_GENERATE.c",
        "$JS.API.STREAM.CREATE.OTHER",
        "_INBOX_gateway.x",
        "_INBOX_pd.x",
    ),
    "operator": ("other.subject", "$SYS.REQ.SERVER.PING", "_INBOX.client.x"),
}

CLOSED = {
    "gateway": ("epd.v1.generate.>", "epd.v1.encode.>", "_INBOX.>", "_INBOX_pd.>", ">"),
    "encoder": (
        "epd.v1.generate.>",
        "epd.v1.held.*",
        "epd.v1.cancel.*",
        "_INBOX.>",
        "_INBOX_gateway.>",
        ">",
    ),
    "pd": ("epd.v1.generate.>", "epd.v1.encode.>", "_INBOX.>", "_INBOX_gateway.>", ">"),
    "client": (
        "epd.v1.generate.>",
        "epd.v1.encode.>",
        "epd.v1.ready.*",
        "epd.v1.held.*",
        "epd.v1.cancel.*",
        "$KV.epd_workers.>",
        "_INBOX.>",
        "_INBOX.other.>",
        "_INBOX_gateway.>",
        "$JS.API.>",
        ">",
    ),
    "operator": ("_INBOX.>", "_INBOX_gateway.>", ">"),
}


async def eventually_refused(refused: list[str], kind: str, subject: str) -> None:
    wanted = f'permissions violation for {kind} to "{subject}"'
    await eventually(lambda: any(wanted in text.lower() for text in refused), wanted)


@pytest.mark.parametrize("role", list(NATS_ROLES))
async def test_what_a_role_may_not_publish(own: Brokers, role: str) -> None:
    refused: list[str] = []
    async with as_role(own, role, refused) as client:
        for subject in FORBIDDEN[role]:
            await client.publish(subject, b"x")
            await eventually_refused(refused, "publish", subject.lower())


@pytest.mark.parametrize("role", list(NATS_ROLES))
async def test_what_a_role_may_not_read(own: Brokers, role: str) -> None:
    refused: list[str] = []
    async with as_role(own, role, refused) as client:
        for subject in CLOSED[role]:
            await client.subscribe(subject)
            await eventually_refused(refused, "subscription", subject.lower())


async def test_a_job_cannot_make_a_worker_publish_elsewhere(
    stack: ServiceStack, own: Brokers
) -> None:
    """The sender of a request or a job names where the answer goes, and the worker has rights of its own."""
    heard: list[str] = []

    async def note(message: Any) -> None:
        heard.append(message.subject)

    async with nats_admin(own) as admin:
        targets = ("_INBOX_encoder.victim", "other.place", "$JS.API.STREAM.PURGE.EPD_DLQ")
        for target in targets[:2]:
            await admin.subscribe(target, cb=note)
        await admin.flush()
        before = (await admin.jetstream().stream_info("EPD_DLQ")).state
        for target in targets:
            await admin.publish(f"epd.v1.health.{stack.pds[0].id}", b"", reply=target)
            await admin.publish(f"epd.v1.health.{stack.encoders[0].id}", b"", reply=target)
        job = direct_job(stack, "other.place")
        await admin.jetstream().publish(subjects.generate_subject(stack.model, "l0"), encode(job))
        assert text_of(await stack.ask("after it")) == "after it"
        await eventually(lambda: not stack.pds[0].engine.running, "the job is done")
        await admin.flush()
        after = (await admin.jetstream().stream_info("EPD_DLQ")).state
        assert [subject for subject in heard if subject != "_INBOX_encoder.victim"] == []
        assert (before.messages, before.first_seq) == (after.messages, after.first_seq)


@contextlib.asynccontextmanager
async def nats_admin(own: Brokers) -> AsyncIterator[NatsClient]:
    client = await nats.connect(own.nats_url, allow_reconnect=False)
    try:
        yield client
    finally:
        await client.close()


REDIS_FORBIDDEN = {
    "gateway": (
        ("GET", "epd:v1:emb:k"),
        ("SET", "epd:v1:emb:k", "x"),
        ("GET", "epd:v1:body:b"),
        ("DEL", "epd:v1:media:m"),
        ("HGETALL", "epd:v1:sizes:f"),
        ("SET", "other", "x"),
    ),
    "encoder": (
        ("GET", "epd:v1:body:b"),
        ("GET", "epd:v1:file:f"),
        ("SET", "epd:v1:media:m", "x"),
        ("GETEX", "epd:v1:media:m", "EX", "9"),
        ("ZADD", "epd:v1:held:t:ends", "1", "m"),
        ("DEL", "epd:v1:emb:k"),
        ("ZADD", "epd:v1:waiting:k", "1", "r"),
        ("SET", "epd:v1:cancelled:r", "1"),
        ("HSET", "epd:v1:sizes:f", "a", "b"),
        ("SET", "other", "x"),
    ),
    "pd": (
        ("SET", "epd:v1:body:b", "x"),
        ("SET", "epd:v1:file:f", "x"),
        ("DEL", "epd:v1:media:m"),
        ("HDEL", "epd:v1:held:t:sizes", "m"),
        ("SET", "other", "x"),
    ),
    "operator": (("FLUSHALL",), ("SET", "other", "x"), ("ACL", "LIST"), ("SHUTDOWN", "NOSAVE")),
}
_EVERYBODY = (
    ("CONFIG", "GET", "*"),
    ("KEYS", "*"),
    ("ACL", "SETUSER", "gateway", "on"),
    ("FLUSHDB",),
    ("SUBSCRIBE", "c"),
    ("CLIENT", "LIST"),
)


@pytest.mark.parametrize("role", list(REDIS_FORBIDDEN))
async def test_what_a_role_may_not_do_on_valkey(own: Brokers, role: str) -> None:
    async with Redis.from_url(own.redis.url_for(role)) as redis:
        assert await redis.ping()
        for command in (*REDIS_FORBIDDEN[role], *_EVERYBODY):
            with pytest.raises(NoPermissionError):
                await redis.execute_command(*command)
                pytest.fail(f"{role} may {command}")


async def test_a_script_has_no_more_rights_than_its_user(own: Brokers) -> None:
    async with Redis.from_url(own.redis.url_for("encoder")) as redis:
        script = redis.register_script("return redis.call('GET', 'epd:v1:body:b')")
        with pytest.raises(Exception, match=r"(?i)acl|permission"):
            await script(keys=["epd:v1:state:k"])


# -- the files that are shipped ---------------------------------------------------------------------


class ShippedNats(NatsBroker):
    """With the users of ``deploy/nats/users.conf`` and no others."""

    def _config(self) -> str:
        whole = super()._config()
        start, end = whole.index("authorization {"), whole.index("jetstream {")
        return f'{whole[:start]}include "users.conf"\n{whole[end:]}'

    def url_for(self, role: str) -> str:
        password = os.environ[f"EPD_NATS_{role.upper()}_PASSWORD"].strip('"')
        return f"nats://{role}:{password}@127.0.0.1:{self._port}"


class ShippedValkey(ValkeyBroker):
    """With the users of ``deploy/valkey/users.conf`` and no others."""

    def _config(self) -> str:
        lines = super()._config().splitlines()
        kept = [line for line in lines if not line.startswith(("user ", "requirepass "))]
        return "\n".join([*kept, f"include {self.folder / 'users.conf'}", ""])

    def url_for(self, role: str) -> str:
        return f"unix://{role}:change-me-{role}@{self._socket_path}"

    async def _answers(self) -> bool:
        self._password = "operator change-me-operator"  # the default user is off
        return await super()._answers()


async def test_the_shipped_files_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for role in NATS_ROLES:
        monkeypatch.setenv(f"EPD_NATS_{role.upper()}_PASSWORD", f'"12e3{secrets.token_hex(4)}"')
    monkeypatch.setattr("epd_cli.brokers.NatsBroker", ShippedNats)
    monkeypatch.setattr("epd_cli.brokers.ValkeyBroker", ShippedValkey)
    for name, source in (("nats", "nats/users.conf"), ("valkey", "valkey/users.conf")):
        folder = tmp_path / "state" / name
        folder.mkdir(parents=True)
        (folder / Path(source).name).write_text((DEPLOY / source).read_text())
    async with embedded_brokers(tmp_path / "state") as shipped:
        operator = shipped.nats.url_for("operator"), shipped.redis.url_for("operator")
        async with bare_stack(*operator, tmp_path, by_role=shipped) as stack:
            await stack.add_encoder()
            await stack.add_pd()
            await stack.add_gateway()
            await stack.ready()
            data = picture()
            assert text_of(await stack.ask("served", data)) == answer_text("served", data)
    assert refusals(caplog) == []


async def test_a_changed_queue_limit_is_the_gateways_to_apply(
    own: Brokers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with bare_stack(own.nats_url, own.redis_url, tmp_path, by_role=own) as stack:
        await stack.add_pd(queue_max_jobs=77)
        await stack.add_gateway(queue_max_jobs=78)
        await stack.ready()
        info = await stack.bus.js.stream_info("EPD_GENERATE")
        assert info.config.max_msgs == 78
    assert refusals(caplog) == []
