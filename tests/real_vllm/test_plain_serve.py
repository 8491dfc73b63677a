"""Plain ``vllm serve`` with our connector and vLLM's own proxy: the answers, and what goes wrong."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from answers import Tokens, ask
from cases import Case, CaseMaker
from deployment import SMALL_MODEL, colocated_server
from plain_serve import NAME, QUOTA_BYTES, WAIT_S, Part, PlainServe, plain_serve

from epd_common.store.embedding import HEADER_BYTES, pack_header, unpack_header
from models import shapes

pytestmark = [pytest.mark.vllm, pytest.mark.extra, pytest.mark.timeout(600)]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that no other test uses, with a question and its right answer."""

    part: Part
    question: Part
    answer: str
    uuid: str


class Pictures:
    def __init__(self) -> None:
        self._rng = random.Random(77)
        self._count = 0

    def new(self, size: int = 84) -> Picture:
        scene = shapes.random_scene(self._rng)
        uri = shapes.data_uri(shapes.draw(scene, size, size, self._rng))
        asked = shapes.ask(self._rng, [scene], "what")
        self._count += 1
        return Picture(
            {"type": "image_url", "image_url": {"url": uri}},
            {"type": "text", "text": asked.text},
            asked.answer,
            f"a client's/../uuid {self._count}",
        )


@pytest.fixture(scope="module")
def pictures() -> Pictures:
    return Pictures()


def chosen_cases() -> list[Case]:
    """A dozen requests with up to four pictures: shared, repeated, in turns, between text, and none."""

    def pictures_in(case: Case) -> int:
        contents = [m["content"] for m in case.messages if isinstance(m["content"], list)]
        return sum(part["type"] == "image_url" for parts in contents for part in parts)

    few = [case for case in CaseMaker(31).all() if pictures_in(case) <= 4]
    return few[::3]


@dataclass(frozen=True, slots=True)
class Compared:
    plain: PlainServe
    reference: dict[str, Tokens]


@pytest.fixture(scope="module")
async def compared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Compared]:
    """The deployment, and what one server with the whole model answered; that one has ended."""
    folder = tmp_path_factory.mktemp("plain-serve")

    async def ask_one_server() -> dict[str, Tokens]:
        async with colocated_server(SMALL_MODEL, NAME, folder) as url:
            return {
                case.title: await ask(url, NAME, case.messages, stream=case.stream)
                for case in chosen_cases()
            }

    asking = asyncio.create_task(ask_one_server())
    try:
        async with plain_serve(folder) as plain:
            yield Compared(plain, await asking)
    finally:
        asking.cancel()


@pytest.fixture
async def plain(compared: Compared) -> AsyncIterator[PlainServe]:
    """Whatever a test does: the engines live on, and no request leaves a pin behind."""
    yield compared.plain
    assert await compared.plain.encoder.healthy()
    assert await compared.plain.pd.healthy(), compared.plain.pd.log()[-3000:]
    assert compared.plain.pinned() == []


async def right(plain: PlainServe, picture: Picture) -> None:
    """The proxy gets the right answer for a picture, whatever happened to its embedding."""
    part = {**picture.part, "uuid": picture.uuid}
    answer = await plain.proxy.chat([part, picture.question])
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == picture.answer


async def test_answers_are_those_of_one_server(compared: Compared, plain: PlainServe) -> None:
    cases = chosen_cases()
    assert len(cases) >= 12
    at_once = asyncio.Semaphore(
        3
    )  # more would evict each other's embeddings from so small an arena

    async def ask_proxy(case: Case) -> Tokens:
        async with at_once:
            return await ask(plain.proxy.url, NAME, case.messages, stream=case.stream)

    answers = await asyncio.gather(*(ask_proxy(case) for case in cases))
    for case, answer in zip(cases, answers, strict=True):
        expected = compared.reference[case.title]
        assert (answer.text, answer.ids) == (expected.text, expected.ids), case.title
        assert answer.prompt_tokens == expected.prompt_tokens, case.title
        assert answer.finish_reason == expected.finish_reason
    assert plain.files(), "the embeddings went through the arena"


def cut(data: bytes) -> bytes:
    return data[:-100]


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def foreign(data: bytes) -> bytes:
    header = msgspec.structs.replace(unpack_header(data), fingerprint="0" * 64)
    return pack_header(header) + data[HEADER_BYTES:]


@pytest.mark.parametrize("damage", [cut, flipped, foreign])
async def test_an_unfit_embedding_fails_its_request_alone(
    plain: PlainServe, pictures: Pictures, damage: Callable[[bytes], bytes]
) -> None:
    picture, other = pictures.new(), pictures.new()
    part, file = await plain.encode_new(picture.part, picture.uuid)
    file.write_bytes(damage(file.read_bytes()))
    started = time.monotonic()
    answer, _ = await asyncio.gather(plain.pd.chat([part, picture.question]), right(plain, other))
    assert answer.status_code == 500, answer.text
    assert time.monotonic() - started < WAIT_S, "there is nothing to wait for"
    assert not file.exists(), "it is taken out"
    await right(plain, picture)


async def test_the_proxys_second_try_succeeds(plain: PlainServe, pictures: Pictures) -> None:
    """The proxy asks the encoder again after a 500, and it publishes again what its engine still holds."""
    picture = pictures.new()
    before = plain.files()
    with plain.pd.frozen():
        asking = asyncio.create_task(right(plain, picture))
        file = await plain.new_file(before)
        file.write_bytes(flipped(file.read_bytes()))
    await asking
    assert file.exists()
    assert "re-encoding and retrying" in plain.proxy.log()


async def test_an_encoder_replaces_a_damaged_embedding(
    plain: PlainServe, pictures: Pictures
) -> None:
    picture = pictures.new()
    part, file = await plain.encode_new(picture.part, picture.uuid)
    whole = file.read_bytes()
    file.write_bytes(flipped(whole))
    assert await plain.encode(picture.part, picture.uuid) == part
    assert file.read_bytes() == whole


async def test_an_evicted_embedding_fails_its_request_after_a_while(
    plain: PlainServe, pictures: Pictures
) -> None:
    picture, other = pictures.new(), pictures.new()
    part, file = await plain.encode_new(picture.part, picture.uuid)
    file.unlink()
    started = time.monotonic()
    waiting = asyncio.create_task(plain.pd.chat([part, picture.question]))
    await right(plain, other)
    assert not waiting.done(), "others go on meanwhile"
    answer = await waiting
    assert answer.status_code == 500, answer.text
    assert WAIT_S <= time.monotonic() - started < WAIT_S + 5
    assert f"item {picture.uuid!r} was in the arena" in plain.pd.log()
    await right(plain, picture)


async def test_an_embedding_that_comes_in_time(plain: PlainServe, pictures: Pictures) -> None:
    picture, other = pictures.new(), pictures.new()
    part, file = await plain.encode_new(picture.part, picture.uuid)
    file.unlink()
    waiting = asyncio.create_task(plain.pd.chat([part, picture.question]))
    await right(plain, other)  # by now the PD server has the first one, too
    assert not waiting.done()
    await plain.encode_new(picture.part, picture.uuid)
    answer = await waiting
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == picture.answer


async def test_a_false_grid_fails_its_request_alone(plain: PlainServe, pictures: Pictures) -> None:
    picture = pictures.new()
    part, file = await plain.encode_new(picture.part, picture.uuid)
    time_, height, width = part["image_embeds"]["image_grid_thw"]
    for grid in ([time_, height, 2 * width], [time_, height // 2, width]):
        false = {**part, "image_embeds": {"image_grid_thw": grid}}
        answer = await plain.pd.chat([false, picture.question])
        assert answer.status_code == 500, answer.text
    assert file.exists(), "the embedding is not to blame"
    await right(plain, picture)


async def test_pixels_without_an_embedding_are_encoded_by_the_engine(
    plain: PlainServe, pictures: Pictures
) -> None:
    picture = pictures.new()
    before = plain.files()
    answer = await plain.pd.chat([picture.part, picture.question])
    assert answer.json()["choices"][0]["message"]["content"] == picture.answer
    assert plain.files() == before


async def test_pixels_with_an_embedding_are_not_encoded(
    plain: PlainServe, pictures: Pictures
) -> None:
    """Shown by an embedding that is another picture's, under the right key."""
    one, other = pictures.new(), pictures.new()
    assert one.answer != other.answer
    _, file = await plain.encode_new(one.part, one.uuid)
    _, others_file = await plain.encode_new(other.part, other.uuid)
    header = msgspec.structs.replace(unpack_header(others_file.read_bytes()), key=file.name)
    file.write_bytes(pack_header(header) + others_file.read_bytes()[HEADER_BYTES:])
    answer = await plain.pd.chat([{**one.part, "uuid": one.uuid}, one.question])
    assert answer.json()["choices"][0]["message"]["content"] == other.answer


async def test_fc28_the_arena_stays_within_its_quota(plain: PlainServe, pictures: Pictures) -> None:
    many = [pictures.new(size=112) for _ in range(60)]
    largest = 0

    async def ask_about(picture: Picture, *more: Picture) -> None:
        nonlocal largest
        content = [picture.part, *(each.part for each in more), picture.question]
        answer = await plain.proxy.chat(content)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == picture.answer
        largest = max(largest, await asyncio.to_thread(used_bytes, plain.arena))

    for start in range(0, len(many), 6):
        six = many[start : start + 6]
        await asyncio.gather(*(ask_about(six[i], *six[i + 1 : i + 3]) for i in (0, 3)))
    assert QUOTA_BYTES / 2 < largest <= QUOTA_BYTES
    assert len(plain.files()) < len(many), "the oldest had to go"


def used_bytes(arena: Path) -> int:
    with os.scandir(arena / "data") as entries:
        return sum(entry.stat().st_size for entry in entries)
