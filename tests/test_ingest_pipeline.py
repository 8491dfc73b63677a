"""The whole of ingest, with real pictures, and a media store and a fetcher that note what they are asked."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from PIL import Image

from epd_common.errors import BadRequestError, EpdError, TooLargeError, UnavailableError
from epd_common.ingest import FetchedMedia, Ingest, IngestLimits, PictureChecker, StoredFile
from epd_common.ingest.body import CHAT, COMPLETIONS
from epd_common.protocol import Item, Media
from epd_common.protocol.keys import digest, embedding_key

FINGERPRINT = "f" * 64
SCOPE = "tenant-1"
SPECIAL = ["<|image_pad|>"]


def png(shade: int, size: tuple[int, int] = (8, 6)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (shade, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


RED, BLUE, GREEN = png(1), png(2), png(3, (6, 8))


def data_uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def ref(n: int) -> dict[str, Any]:
    return {"type": "media_ref", "item": n}


def chat(*parts: object, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], **fields}


def key(data: bytes, args: dict[str, Any] | None = None) -> str:
    return embedding_key(
        media_digest=digest(data), fingerprint=FINGERPRINT, scope=SCOPE, processor_args=args
    )


def stored(data: bytes, width: int, height: int) -> StoredFile:
    return StoredFile(
        digest=digest(data),
        ref=digest(data),
        content_type="image/png",
        width=width,
        height=height,
        bytes=len(data),
    )


class Store:
    """Media store, files and web in one."""

    def __init__(self) -> None:
        self.puts: list[bytes] = []
        self.owners: list[str] = []
        self.fetched: list[str] = []
        self.started = asyncio.Semaphore(0)
        self.web: dict[str, FetchedMedia | EpdError] = {}
        self.cancelled: list[str] = []

    async def put(self, data: bytes, *, digest: str, content_type: str, owner: str) -> str:
        assert content_type.startswith(("image/", "video/", "audio/"))
        self.puts.append(data)
        self.owners.append(owner)
        return digest

    async def lookup(self, file_id: str, scope: str) -> StoredFile | None:
        if (file_id, scope) != ("file-green", SCOPE):
            return None
        return stored(GREEN, 6, 8)

    async def fetch(self, url: str, place: str, *, owner: str = "") -> FetchedMedia:
        assert owner == SCOPE
        self.fetched.append(url)
        self.started.release()
        if url.endswith("/hangs"):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.append(place)
                raise
        answer = self.web[url]
        if isinstance(answer, EpdError):
            raise answer
        return answer


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture(scope="module")
async def checker() -> AsyncIterator[PictureChecker]:
    async with PictureChecker(IngestLimits(decode_workers=1)) as running:
        yield running


@pytest.fixture
def ingest(store: Store, checker: PictureChecker) -> Ingest:
    return Ingest(store, checker, IngestLimits(), store.fetch, store)


async def prepare(
    ingest: Ingest,
    body: dict[str, Any],
    *items: Item,
    route: str = CHAT,
    modalities: Sequence[str] = ("image", "video", "audio"),
) -> Any:
    return await ingest.prepare(
        route=route,
        body=body,
        fingerprint=FINGERPRINT,
        scope=SCOPE,
        special_tokens=SPECIAL,
        modalities=modalities,
        items=items,
    )


async def test_every_source_becomes_an_item_in_order(ingest: Ingest, store: Store) -> None:
    store.web["https://example.com/blue"] = FetchedMedia(BLUE, "image/jpeg")
    body = chat(
        {"type": "text", "text": "compare"},
        image(data_uri(RED)),
        {"type": "input_image", "file_id": "file-green"},
        image("https://example.com/blue"),
        model="m",
    )
    prepared = await prepare(ingest, body)
    assert prepared.body == chat(
        {"type": "text", "text": "compare"}, ref(0), ref(1), ref(2), model="m"
    )
    assert prepared.items == [
        Item(
            media=Media(ref=digest(data), content_type="image/png"),
            key=key(data),
            digest=digest(data),
            width=width,
            height=height,
        )
        for data, width, height in ((RED, 8, 6), (GREEN, 6, 8), (BLUE, 8, 6))
    ]
    assert sorted(store.puts) == sorted([RED, BLUE])  # The client's own bytes; the file is there.


async def test_fc36_equal_bytes_are_one_item_however_they_come(
    ingest: Ingest, store: Store
) -> None:
    for path in "ab":
        store.web[f"https://example.com/{path}"] = FetchedMedia(RED, "")
    body = chat(
        image(data_uri(BLUE)),
        image("https://example.com/a"),
        image(data_uri(RED, "image/x")),
        image("https://example.com/b"),
        image("https://example.com/a"),
        image(data_uri(BLUE)),
    )
    prepared = await prepare(ingest, body)
    numbers = [part["item"] for part in prepared.body["messages"][0]["content"]]
    assert numbers == [0, 1, 1, 1, 1, 0]
    assert [item.key for item in prepared.items] == [key(BLUE), key(RED)]
    assert sorted(store.puts) == sorted([RED, BLUE])
    assert sorted(store.fetched) == ["https://example.com/a", "https://example.com/b"]


async def test_a_clients_uuid_has_no_part_in_the_key(ingest: Ingest) -> None:
    one = await prepare(ingest, chat({**image(data_uri(RED)), "uuid": "same"}))
    two = await prepare(ingest, chat({**image(data_uri(BLUE)), "uuid": "same"}))
    assert (one.items[0].key, two.items[0].key) == (key(RED), key(BLUE))


async def test_processor_arguments_go_to_the_items(ingest: Ingest) -> None:
    args = {"max_pixels": 100}
    prepared = await prepare(ingest, chat(image(data_uri(RED)), mm_processor_kwargs=args))
    assert prepared.body == chat(ref(0))
    assert prepared.items[0].processor_args == args
    assert prepared.items[0].key == key(RED, args) != key(RED)


async def test_text_only_touches_nothing(ingest: Ingest, store: Store) -> None:
    body = {"prompt": "hello"}
    prepared = await prepare(ingest, body, route=COMPLETIONS)
    assert (prepared.body, prepared.items, store.puts) == (body, [], [])


async def test_large_media_take_the_path_off_the_event_loop(ingest: Ingest) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((800, 800), 100).save(buffer, "PNG")
    data = buffer.getvalue()
    assert len(data) > 300_000
    prepared = await prepare(ingest, chat(image(data_uri(data))))
    assert prepared.items[0].digest == digest(data)


async def test_an_upload(ingest: Ingest, store: Store) -> None:
    admitted = await ingest.admit(GREEN, declared="image/png", place="file", owner="me")
    assert admitted == stored(GREEN, 6, 8)
    assert (store.puts, store.owners) == ([GREEN], ["me"])


@pytest.mark.parametrize(
    ("bad", "status", "code"),
    [
        (image("data:image/png;base64,!"), 400, "invalid_data_uri"),
        (image(data_uri(RED[:-20])), 400, "invalid_image"),
        (image(data_uri(b"plain text", "text/plain")), 415, "unsupported_media"),
        (image(data_uri(RED, "text/html")), 415, "unsupported_media"),
        (image("file:///etc/passwd"), 400, "media_url_refused"),
        (image("/etc/passwd"), 400, "media_url_refused"),
        (image("ftp://example.com/a.png"), 400, "media_url_refused"),
        ({"type": "input_image", "file_id": "file-none"}, 404, "file_not_found"),
        (ref(0), 400, "invalid_media_ref"),
    ],
)
async def test_the_bad_item_is_named(
    ingest: Ingest, store: Store, bad: dict[str, Any], status: int, code: str
) -> None:
    with pytest.raises(EpdError) as caught:
        await prepare(ingest, chat({"type": "text", "text": "x"}, bad))
    assert (caught.value.status, caught.value.code) == (status, code)
    assert str(caught.value.param).startswith("messages[0].content[1]")
    assert "messages[0].content[1]" in caught.value.message
    assert store.puts == []


async def test_limits(store: Store, checker: PictureChecker) -> None:
    limits = IngestLimits(max_media_bytes=len(RED) - 1, max_items=2)
    ingest = Ingest(store, checker, limits)
    with pytest.raises(TooLargeError) as caught:
        await prepare(ingest, chat(image(data_uri(RED))))
    assert caught.value.code == "media_too_large"
    with pytest.raises(TooLargeError) as caught:
        await prepare(ingest, chat(*[image(data_uri(RED))] * 3))
    assert caught.value.code == "too_many_items"


async def test_reserved_text_is_refused_before_any_work(ingest: Ingest, store: Store) -> None:
    body = chat({"type": "text", "text": SPECIAL[0]}, image("https://example.com/a"))
    with pytest.raises(BadRequestError) as caught:
        await prepare(ingest, body)
    assert caught.value.code == "reserved_token"
    assert store.fetched == []


async def test_without_a_fetcher_urls_are_refused_and_the_rest_works(
    store: Store, checker: PictureChecker
) -> None:
    ingest = Ingest(store, checker, IngestLimits())
    assert (await prepare(ingest, chat(image(data_uri(RED))))).items
    with pytest.raises(BadRequestError) as caught:
        await prepare(ingest, chat(image("https://example.com/a")))
    assert caught.value.code == "media_url_refused"
    with pytest.raises(EpdError) as missing:
        await prepare(ingest, chat({"type": "input_image", "file_id": "file-green"}))
    assert missing.value.code == "file_not_found"


@pytest.mark.parametrize(
    "error",
    [
        BadRequestError("no", code="media_fetch_failed", param="p"),
        UnavailableError("store is away"),
    ],
)
async def test_fc38_the_first_failure_ends_the_others(
    ingest: Ingest, store: Store, error: EpdError
) -> None:
    store.web["https://example.com/bad"] = error
    body = chat(image("https://example.com/hangs"), image("https://example.com/bad"))
    with pytest.raises(EpdError) as caught:
        await prepare(ingest, body)
    assert caught.value is error
    assert store.cancelled == ["messages[0].content[0]"]


async def test_cancelling_the_request_cancels_its_loads(ingest: Ingest, store: Store) -> None:
    request = asyncio.ensure_future(prepare(ingest, chat(image("https://example.com/hangs"))))
    await store.started.acquire()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert store.cancelled == ["messages[0].content[0]"]


async def test_loads_of_one_request_are_bounded(store: Store, checker: PictureChecker) -> None:
    ingest = Ingest(store, checker, IngestLimits(concurrent_loads=2), store.fetch)
    urls = [f"https://example.com/{n}/hangs" for n in range(5)]
    request = asyncio.ensure_future(prepare(ingest, chat(*map(image, urls))))
    await store.started.acquire()
    await store.started.acquire()
    for _ in range(20):
        await asyncio.sleep(0)
    assert store.fetched == urls[:2]
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


# Direct jobs: the client brings items.


def raw(data: bytes, **fields: Any) -> Item:
    return Item(media=Media(inline=data, content_type="image/png"), **fields)


def keyed(data: bytes, **fields: Any) -> Item:
    known = {"key": key(data), "digest": digest(data), "width": 8, "height": 6}
    return Item(**{"media": Media(ref=digest(data)), **known, **fields})


async def test_raw_items_are_completed(ingest: Ingest, store: Store) -> None:
    prepared = await prepare(
        ingest, chat(ref(1), ref(0), ref(2), image(data_uri(RED))), raw(RED), raw(BLUE), raw(RED)
    )
    assert prepared.body == chat(ref(0), ref(1), ref(1), ref(1))
    assert [item.key for item in prepared.items] == [key(BLUE), key(RED)]
    assert [item.digest for item in prepared.items] == [digest(BLUE), digest(RED)]
    assert all(item.media.ref and item.media.inline is None for item in prepared.items)
    assert {(item.width, item.height) for item in prepared.items} == {(8, 6)}
    assert sorted(store.puts) == sorted([RED, BLUE])


async def test_keyed_items_are_verified_and_kept(ingest: Ingest, store: Store) -> None:
    item = keyed(RED, epoch=7)
    prepared = await prepare(ingest, chat(ref(0)), item)
    assert (prepared.items, store.puts) == ([item], [])


async def test_what_a_gateway_prepared_passes_a_second_time(ingest: Ingest) -> None:
    body = chat(image(data_uri(RED)), image(data_uri(BLUE)), mm_processor_kwargs={"max_pixels": 1})
    once = await prepare(ingest, body)
    assert await prepare(ingest, once.body, *once.items) == once


@pytest.mark.parametrize(
    ("item", "code", "param"),
    [
        (keyed(RED, key=key(BLUE)), "key_mismatch", "items[0].key"),
        (keyed(RED, media=Media(ref=digest(BLUE))), "key_mismatch", "items[0].media.ref"),
        (keyed(RED, key=""), "key_mismatch", "items[0].key"),
        (keyed(RED, processor_args={"max_pixels": 1}), "key_mismatch", "items[0].key"),
        (keyed(RED, digest="abc"), "invalid_request", "items[0].digest"),
        (keyed(RED, digest=digest(RED).upper()), "invalid_request", "items[0].digest"),
        (raw(RED, key=key(BLUE)), "key_mismatch", "items[0].key"),
        (raw(RED, digest=digest(BLUE)), "key_mismatch", "items[0].digest"),
        (raw(RED, modality="video"), "unsupported_media", "items[0]"),
        (keyed(RED, modality="video"), "key_mismatch", "items[0].key"),
        (raw(RED[:-20]), "invalid_image", "items[0]"),
        (raw(b""), "unsupported_media", "items[0]"),
        (Item(media=Media()), "invalid_request", "items[0].media"),
        (Item(media=Media(ref="a", inline=RED)), "invalid_request", "items[0].media"),
    ],
)
async def test_wrong_items(ingest: Ingest, item: Item, code: str, param: str) -> None:
    with pytest.raises(EpdError) as caught:
        await prepare(ingest, chat(ref(0)), item)
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize("number", [-1, 1, 10**30])
async def test_references_out_of_range(ingest: Ingest, number: int) -> None:
    with pytest.raises(BadRequestError) as caught:
        await prepare(ingest, chat(ref(number)), raw(RED))
    assert caught.value.code == "invalid_media_ref"
    assert caught.value.param == "messages[0].content[0].item"


async def test_items_that_nothing_refers_to(ingest: Ingest) -> None:
    with pytest.raises(BadRequestError) as caught:
        await prepare(ingest, chat(ref(0)), raw(RED), raw(BLUE))
    assert (caught.value.code, caught.value.param) == ("invalid_media_ref", "items[1]")


async def test_inline_media_are_bounded_together(store: Store, checker: PictureChecker) -> None:
    items = [raw(RED), raw(BLUE)]
    total = len(RED) + len(BLUE)
    fits = Ingest(store, checker, IngestLimits(max_inline_bytes=total))
    assert (await prepare(fits, chat(ref(0), ref(1)), *items)).items
    short = Ingest(store, checker, IngestLimits(max_inline_bytes=total - 1))
    with pytest.raises(TooLargeError) as caught:
        await prepare(short, chat(ref(0), ref(1)), *items)
    assert (caught.value.code, caught.value.param) == ("inline_too_large", "items")


async def test_processor_arguments_of_items_and_body_must_agree(ingest: Ingest) -> None:
    args = {"max_pixels": 1}
    own = await prepare(ingest, chat(ref(0)), raw(RED, processor_args=args))
    both = await prepare(
        ingest, chat(ref(0), mm_processor_kwargs=args), raw(RED, processor_args=args)
    )
    assert own.items[0].key == both.items[0].key == key(RED, args)
    with pytest.raises(BadRequestError) as caught:
        await prepare(
            ingest,
            chat(ref(0), mm_processor_kwargs={"max_pixels": 2}),
            raw(RED, processor_args=args),
        )
    assert caught.value.param == "items[0].processor_args"


WAV = b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(28)
MP4 = b"\x00\x00\x00\x18ftypisom" + bytes(16)


async def test_every_modality_has_items_of_its_own(ingest: Ingest, store: Store) -> None:
    store.web["https://example.com/clip"] = FetchedMedia(MP4, "video/mp4")
    sound = base64.b64encode(WAV).decode()
    prepared = await prepare(
        ingest,
        chat(
            {"type": "video_url", "video_url": {"url": "https://example.com/clip"}},
            {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
            image(data_uri(RED)),
            {"type": "audio_url", "audio_url": {"url": data_uri(WAV, "audio/wav")}},
        ),
    )
    assert [item.modality for item in prepared.items] == ["video", "audio", "image"]
    assert [part["item"] for part in prepared.body["messages"][0]["content"]] == [0, 1, 2, 1]
    assert store.puts == [MP4, WAV, RED]
    video, audio, _ = prepared.items
    assert (video.media.content_type, audio.media.content_type) == ("video/mp4", "audio/wav")
    assert video.key == embedding_key(
        media_digest=digest(MP4), fingerprint=FINGERPRINT, scope=SCOPE, modality="video"
    )
    assert await prepare(ingest, prepared.body, *prepared.items) == prepared


async def test_one_url_as_two_modalities_is_loaded_as_each(ingest: Ingest, store: Store) -> None:
    store.web["https://example.com/a"] = FetchedMedia(MP4, "video/mp4")
    body = chat(
        {"type": "video_url", "video_url": {"url": "https://example.com/a"}},
        image("https://example.com/a"),
    )
    with pytest.raises(EpdError) as caught:
        await prepare(ingest, body)
    assert (caught.value.code, caught.value.param) == (
        "unsupported_media",
        "messages[0].content[1]",
    )


async def test_what_the_model_does_not_take_is_refused_before_it_is_loaded(
    ingest: Ingest, store: Store
) -> None:
    body = chat(image("https://example.com/a"), {"type": "audio_url", "audio_url": "https://b/c"})
    with pytest.raises(BadRequestError, match=r"takes image and video") as caught:
        await prepare(ingest, body, modalities=("image", "video"))
    assert (caught.value.code, caught.value.param) == (
        "modality_not_supported",
        "messages[0].content[1]",
    )
    assert store.fetched == []
    with pytest.raises(BadRequestError, match=r"takes text alone"):
        await prepare(ingest, body, modalities=())


async def test_videos_and_sound_take_no_processor_arguments(ingest: Ingest, store: Store) -> None:
    clip = {"type": "video_url", "video_url": {"url": data_uri(MP4, "video/mp4")}}
    with pytest.raises(BadRequestError, match="video input") as caught:
        await prepare(
            ingest, chat(image(data_uri(RED)), clip, mm_processor_kwargs={"max_pixels": 9})
        )
    assert caught.value.param == "mm_processor_kwargs"
    item = raw(MP4, modality="video", processor_args={"max_pixels": 9})
    with pytest.raises(BadRequestError) as caught:
        await prepare(ingest, chat(ref(0)), item)
    assert caught.value.param == "items[0].processor_args"
    assert store.puts == []
