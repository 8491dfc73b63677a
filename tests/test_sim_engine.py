"""Simulated engines by themselves, on an arena: what they take time for, read, refuse, and do wrong."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epd_common.engines import AnswerHead, Placeholder, StagedEmbedding
from epd_common.errors import BadRequestError, EpdError, UpstreamError
from epd_common.store import Arena
from epd_common.store.embedding import (
    HEADER_BYTES,
    IntegrityError,
    pack_header,
    payload_checksum,
    unpack_header,
)
from epd_sim.answers import expected_answer
from epd_sim.embedding import signature
from epd_sim.encoder_engine import SimEncoderEngine
from epd_sim.engine import SimOptions, sim_fingerprint
from epd_sim.faults import FaultPlan
from epd_sim.pd_engine import SimPdEngine
from epd_sim.profiles import profile_named
from service_stack import BOUND_S, CHAT, eventually, picture
from sim_stack import Time

H100 = profile_named("qwen2.5-vl-7b-h100")
SMALL = dataclasses.replace(H100, width=64)
"""Its times, without its megabytes."""


def options(plan: FaultPlan | None = None) -> SimOptions:
    return SimOptions(served="sim", profile=SMALL, plan=plan or FaultPlan())


class Rig:
    """An encoder engine and a PD engine of one model on one arena, in simulated time."""

    def __init__(self, arena: Arena, plan: FaultPlan, encode: Any) -> None:
        self.arena = arena
        self.encoder_time, self.pd_time = Time(), Time()
        self.encoder = SimEncoderEngine(
            options(plan), staging=arena.staging, sleep=self.encoder_time
        )
        self.pd = SimPdEngine(
            options(plan), arena=arena, max_num_seqs=4, encode=encode, sleep=self.pd_time
        )

    async def encode(self, data: bytes, *, pin: bool = True) -> Placeholder:
        """Encode a picture and publish it; what PD is told of it."""
        key = secrets.token_hex(32)
        staged = await self.encoder.encode(key, data, "image", {}, ignore)
        self.arena.adopt(staged.path, staged.header)
        if pin:
            self.arena.pin(key)
        return Placeholder(key, "image", staged.header.metadata)

    async def ask(
        self, body: dict[str, Any], placeholders: Sequence[Placeholder] = (), route: str = CHAT
    ) -> tuple[int, Any]:
        """Status and content of an answer that is no stream."""
        head, raw = None, b""
        answer = self.pd.answer(secrets.token_hex(4), route, body, list(placeholders))
        async with contextlib.aclosing(answer), asyncio.timeout(BOUND_S):
            async for part in answer:
                if isinstance(part, AnswerHead):
                    head = part
                else:
                    raw += part.data
        assert head is not None
        return head.status, json.loads(raw)


@contextlib.asynccontextmanager
async def running(folder: Path, *, encode: str = "never", **plan: Any) -> AsyncIterator[Rig]:
    arena = Arena(folder, quota_bytes=1 << 28, worker="w")
    arena.open()
    rig = Rig(arena, FaultPlan(**plan), encode)
    try:
        for engine in (rig.encoder, rig.pd):
            await engine.start(lambda phase: None)
        yield rig
    finally:
        for engine in (rig.encoder, rig.pd):
            await engine.stop()
        arena.close()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running(tmp_path) as made:
        yield made


async def ignore(metadata: dict[str, Any]) -> None:
    """An item's size that nobody waits for."""


def body(*parts: dict[str, Any] | str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "sim",
        "messages": [{"role": "user", "content": list(parts)}],
        **fields,
    }


def shown(item: int) -> dict[str, Any]:
    return {"type": "media_ref", "item": item}


def text_of(found: tuple[int, Any], choice: int = 0) -> str:
    status, content = found
    assert status == 200, content
    return str(content["choices"][choice]["message"]["content"])


# -- encoding --------------------------------------------------------------------------------------


async def test_fc25_items_that_wait_at_the_same_time_share_batches(rig: Rig) -> None:
    rig.encoder_time.passing.clear()
    alone = asyncio.create_task(rig.encode(picture()))
    await eventually(lambda: rig.encoder._device._free.locked(), "the first one is under way")
    sized = []

    async def note(metadata: dict[str, Any]) -> None:
        sized.append(metadata)

    others = [
        asyncio.create_task(rig.encoder.encode(secrets.token_hex(32), picture(), "image", {}, note))
        for _ in range(10)
    ]
    await eventually(lambda: len(sized) == 10, "sizes are told before anything is encoded")
    rig.encoder_time.passing.set()
    await asyncio.gather(alone, *others)
    assert rig.encoder_time.slept == pytest.approx(
        [SMALL.encode_s([4] * count) for count in (1, 8, 2)]
    )


async def test_an_embedding_holds_the_signature_of_its_media_in_every_row(rig: Rig) -> None:
    data = picture()
    item = await rig.encode(data)
    raw = (rig.arena.pins / item.key).read_bytes()
    assert raw[HEADER_BYTES:] == signature(data) * (4 * SMALL.width * 2 // 32)
    assert item.metadata == {"image_grid_thw": [1, 4, 4]}


async def test_bytes_that_are_no_picture_are_refused(rig: Rig) -> None:
    with pytest.raises(BadRequestError, match="cannot be decoded"):
        await rig.encode(b"nothing")


def test_models_and_shapes_have_fingerprints_of_their_own() -> None:
    made = options()
    others = [
        dataclasses.replace(made, served="another"),
        dataclasses.replace(made, revision="2"),
        dataclasses.replace(made, profile=H100),
        dataclasses.replace(made, profile=profile_named("instant")),
    ]
    assert len({sim_fingerprint(one) for one in (made, *others)}) == 5
    slow = dataclasses.replace(made, profile=dataclasses.replace(SMALL, time_scale=9.0))
    assert sim_fingerprint(slow) == sim_fingerprint(made)


# -- answering -------------------------------------------------------------------------------------


async def test_an_answer_takes_the_time_of_its_prompt_and_its_tokens(rig: Rig) -> None:
    asked = body("x" * 4 * 4990, max_tokens=4)  # and 8 tokens of the template
    assert text_of(await rig.ask(asked)) == expected_answer(asked)
    steps = [(2048, 0), (2048, 0), (4998 - 4096, 0), (0, 1), (0, 1), (0, 1)]
    assert rig.pd_time.slept == pytest.approx([SMALL.engine_step_s(*step) for step in steps])


async def test_answers_that_run_together_share_their_steps(rig: Rig) -> None:
    asked = body("x", max_tokens=10)
    alone = await rig.ask(asked)
    steps = len(rig.pd_time.slept)
    together = await asyncio.gather(*(rig.ask(asked) for _ in range(4)))
    assert [text_of(found) for found in together] == [text_of(alone)] * 4
    assert len(rig.pd_time.slept) - steps == steps == 10


async def test_prefill_waits_for_items_in_the_order_of_the_prompt(rig: Rig) -> None:
    data = [picture(), picture()]
    items = [await rig.encode(one, pin=False) for one in data]
    asked = body("x" * 4000, shown(0), "y" * 4000, shown(1), max_tokens=2)
    asking = asyncio.create_task(rig.ask(asked, items))
    # Five tokens of the template before the text, one before each item, and two in all around it.
    steps = [(5 + 1000 + 1, 0)]
    for late in (1, 0):
        await eventually(
            lambda: rig.pd_time.slept == [SMALL.engine_step_s(*step) for step in steps],
            "it prefills to the first item that is missing",
        )
        rig.arena.pin(items[late].key)
        await rig.pd.wake()
    steps += [(4 + 1 + 1000 + 1 + 4 + 1 + 3, 0), (0, 1)]
    assert text_of(await asking) == expected_answer(asked, data)
    assert rig.pd_time.slept == [SMALL.engine_step_s(*step) for step in steps]


async def test_choices_are_counted_and_differ(rig: Rig) -> None:
    asked = body("x", n=3, max_tokens=5)
    found = await rig.ask(asked)
    assert [text_of(found, n) for n in range(3)] == [
        expected_answer(asked, choice=n) for n in range(3)
    ]
    assert found[1]["usage"] == {"prompt_tokens": 9, "completion_tokens": 15, "total_tokens": 24}
    status, content = await rig.ask(body("x", n=5))
    assert (status, content["error"]["param"]) == (400, "n")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 32768}, "max_tokens")],
)
async def test_a_bad_parameter_is_a_400_in_vllms_shape(
    rig: Rig, fields: dict[str, Any], param: str
) -> None:
    status, content = await rig.ask(body("x", **fields))
    assert status == 400
    assert content["error"]["param"] == param
    assert (content["error"]["type"], content["error"]["code"]) == ("BadRequestError", 400)


async def test_a_prompt_that_is_too_long_is_a_400(rig: Rig) -> None:
    status, content = await rig.ask(body("x" * 4 * 32768))
    assert (status, content["error"]["param"]) == (400, "input_tokens")
    assert "maximum context length is 32768 tokens" in content["error"]["message"]


def another(raw: bytearray) -> bytes:
    """The embedding of another picture, under this one's name and with its own checksum."""
    header = unpack_header(raw)
    payload = signature(b"another") * (len(raw[HEADER_BYTES:]) // 32)
    header = msgspec.structs.replace(header, checksum=payload_checksum(payload))
    return pack_header(header) + payload


def truncated(raw: bytearray) -> bytes:
    return bytes(raw[:-32])


def flipped(raw: bytearray) -> bytes:
    raw[-100] ^= 1
    return bytes(raw)


def foreign(raw: bytearray) -> bytes:
    header = msgspec.structs.replace(unpack_header(raw), fingerprint="f" * 64)
    return pack_header(header) + bytes(raw[HEADER_BYTES:])


async def damaged(rig: Rig, damage: Any) -> Placeholder:
    item = await rig.encode(picture())
    path = rig.arena.pins / item.key
    path.write_bytes(damage(bytearray(path.read_bytes())))
    return item


async def test_a_swapped_embedding_is_a_wrong_answer(rig: Rig) -> None:
    asked = body(shown(0), "x")
    text = text_of(await rig.ask(asked, [await damaged(rig, another)]))
    assert text == expected_answer(asked, [b"another"])


@pytest.mark.parametrize("damage", [truncated, flipped, foreign])
async def test_an_unfit_embedding_ends_its_own_request_alone(rig: Rig, damage: Any) -> None:
    unfit, good = await damaged(rig, damage), picture()
    asked = body(shown(0), "x")
    found, other = await asyncio.gather(
        rig.ask(asked, [unfit]), rig.ask(asked, [await rig.encode(good)])
    )
    assert found[0] == 500
    assert unfit.key in found[1]["error"]["message"]
    assert text_of(other) == expected_answer(asked, [good])
    assert rig.pd.alive


async def test_a_closed_answer_leaves_nothing_behind(rig: Rig) -> None:
    answer = rig.pd.answer("a", CHAT, body("x", stream=True, max_tokens=1000, ignore_eos=True), [])
    async for _ in answer:
        break
    await answer.aclose()
    asked = body("y", max_tokens=4)
    assert text_of(await rig.ask(asked)) == expected_answer(asked)
    alone = [SMALL.engine_step_s(0, 1)] * 3
    assert rig.pd_time.slept[-3:] == alone, "the answer that was closed is not gone on with"


async def test_a_slow_reader_of_a_stream_misses_nothing(rig: Rig) -> None:
    asked = body("x", stream=True, max_tokens=12)
    answer = rig.pd.answer("a", CHAT, asked, [])
    raw = b""
    async for part in answer:
        if not isinstance(part, AnswerHead):
            raw += part.data
            await eventually(lambda: not rig.pd._scheduler.running, "all is decoded meanwhile")
    events = [json.loads(event[6:]) for event in raw.split(b"\n\n")[:-2]]
    text = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert text == expected_answer(asked)
    assert events[-1]["choices"][0]["finish_reason"] == "length"


async def test_encoding_and_generating_share_a_pd_engines_device(tmp_path: Path) -> None:
    async with running(tmp_path, encode="always") as rig:
        rig.pd_time.passing.clear()
        asking = asyncio.create_task(rig.ask(body("x", max_tokens=1)))
        await eventually(lambda: rig.pd._device._free.locked(), "a step is under way")
        encoding = asyncio.create_task(
            rig.pd.encode(secrets.token_hex(32), picture(), "image", {}, ignore)
        )
        rig.pd_time.passing.set()
        await asyncio.gather(asking, encoding)
        assert rig.pd_time.slept == [SMALL.engine_step_s(9, 0), SMALL.encode_s([4])]


# -- faults ----------------------------------------------------------------------------------------


async def encode_each(rig: Rig, count: int) -> list[StagedEmbedding | EpdError]:
    """One after another; the errors stand in the places of embeddings."""
    found: list[StagedEmbedding | EpdError] = []
    for _ in range(count):
        try:
            found.append(
                await rig.encoder.encode(secrets.token_hex(32), picture(), "image", {}, ignore)
            )
        except EpdError as error:
            found.append(error)
    return found


async def test_the_nth_encode_gives_nan_which_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, nan_every=2) as rig:
        found = await encode_each(rig, 4)
    assert [isinstance(one, IntegrityError) and one.code for one in found] == [
        False,
        "not_finite",
        False,
        "not_finite",
    ]


async def test_fc15_the_nth_encode_gives_wrong_rows_which_end_its_request(tmp_path: Path) -> None:
    async with running(tmp_path, wrong_rows_every=2) as rig:
        good = picture()
        right, wrong = await rig.encode(good), await rig.encode(picture())
        asked = body(shown(0), "x")
        status, content = await rig.ask(asked, [wrong])
        assert (status, "rows 5, not 4" in content["error"]["message"]) == (500, True)
        assert text_of(await rig.ask(asked, [right])) == expected_answer(asked, [good])


async def test_an_encoder_dies_at_its_nth_encode(tmp_path: Path) -> None:
    async with running(tmp_path, die_at=2) as rig:
        first, second, third = await encode_each(rig, 3)
        assert isinstance(first, StagedEmbedding)
        assert isinstance(second, UpstreamError) and isinstance(third, UpstreamError)
        assert not rig.encoder.alive


async def test_a_pd_engine_dies_at_its_nth_step_and_tells_all(tmp_path: Path) -> None:
    async with running(tmp_path, die_at=3) as rig:
        asked = body("x", max_tokens=5)
        missing = Placeholder(secrets.token_hex(32), "image", {"image_grid_thw": [1, 4, 4]})
        found = await asyncio.gather(
            rig.ask(asked), rig.ask(body(shown(0)), [missing]), return_exceptions=True
        )
        assert [type(one) for one in found] == [UpstreamError, UpstreamError]
        assert not rig.pd.alive
        with pytest.raises(UpstreamError):
            await rig.ask(asked)


async def test_an_engine_hangs_from_its_nth_work_on_and_looks_alive(tmp_path: Path) -> None:
    async with running(tmp_path, hang_at=2) as rig:
        await rig.encode(picture())
        hanging = asyncio.create_task(rig.encode(picture()))
        asking = asyncio.create_task(rig.ask(body("x", max_tokens=2)))
        await eventually(lambda: rig.encoder._tower._faults.count == 2, "the second one begins")
        await eventually(lambda: rig.pd._faults.count == 2, "the second step begins")
        assert rig.encoder.alive and rig.pd.alive
        assert not hanging.done() and not asking.done()
        await rig.encoder.stop()
        await rig.pd.stop()
        ends = await asyncio.gather(hanging, asking, return_exceptions=True)
        assert [type(one) for one in ends] == [UpstreamError, UpstreamError]


async def test_a_slow_engine_takes_so_many_times_as_long(tmp_path: Path) -> None:
    async with running(tmp_path, slow_factor=10.0) as rig:
        await rig.encode(picture())
        await rig.ask(body("x", max_tokens=1))
        assert rig.encoder_time.slept == [10 * SMALL.encode_s([4])]
        assert rig.pd_time.slept == [10 * SMALL.engine_step_s(9, 0)]


async def test_a_bug_ends_an_engine_instead_of_leaving_it_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as rig:
        monkeypatch.setattr(rig.pd._scheduler, "advance", lambda step: 1 / 0)
        with pytest.raises(UpstreamError):
            await rig.ask(body("x"))
        assert not rig.pd.alive
