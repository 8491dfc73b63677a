"""Media parts are found wherever they stand, and bodies of a wrong shape are refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from epd_common.errors import BadRequestError, TooLargeError
from epd_common.ingest.body import CHAT, COMPLETIONS, RESPONSES, Extracted, extract
from epd_common.ingest.parts import FileSource, ItemSource, Source, UrlSource

URL = "https://example.com/a.png"
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
TEXT = {"type": "text", "text": "hello"}
INVALID = "invalid_request"


def chat(*content: object, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(content)}], **fields}


def run(route: str, body: Any, max_items: int = 8) -> Extracted:
    return extract(route, body, max_items=max_items)


@pytest.mark.parametrize(
    ("part", "modality", "source"),
    [
        (IMAGE, "image", UrlSource(URL)),
        ({"type": "image_url", "image_url": URL}, "image", UrlSource(URL)),
        (
            {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
            "image",
            UrlSource(URL),
        ),
        ({**IMAGE, "uuid": "mine"}, "image", UrlSource(URL)),
        ({"type": "input_image", "image_url": URL, "detail": "auto"}, "image", UrlSource(URL)),
        ({"type": "input_image", "image_url": {"url": URL}}, "image", UrlSource(URL)),
        ({"type": "input_image", "image_url": URL, "file_id": None}, "image", UrlSource(URL)),
        ({"type": "input_image", "file_id": "file-1"}, "image", FileSource("file-1")),
        ({"type": "image_file", "image_file": {"file_id": "f-1"}}, "image", FileSource("f-1")),
        ({"type": "video_url", "video_url": {"url": URL}}, "video", UrlSource(URL)),
        ({"type": "audio_url", "audio_url": URL}, "audio", UrlSource(URL)),
        (
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            "audio",
            UrlSource("data:audio/*;base64,AAAA"),
        ),
        ({"type": "media_ref", "item": 3}, None, ItemSource(3)),
    ],
)
@pytest.mark.parametrize("route", [CHAT, RESPONSES])
def test_media_parts(
    route: str, part: dict[str, Any], modality: str | None, source: Source
) -> None:
    name = "messages" if route == CHAT else "input"
    found = run(route, {name: [{"role": "user", "content": [TEXT, part]}]})
    [media] = found.parts
    assert media.source == source
    assert media.place == f"{name}[0].content[1]"
    assert media.modality == modality
    assert found.body[name][0]["content"][1] is media.reference
    assert media.reference["type"] == "media_ref"


def test_media_of_any_message_in_order_and_the_callers_body_stays() -> None:
    def image(n: int) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": f"https://example.com/{n}"}}

    body = {
        "messages": [
            {"role": "system", "content": [image(0), TEXT]},
            {"role": "user", "content": "no parts"},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "tool", "tool_call_id": "x", "content": [TEXT, image(1), image(2)]},
            {"role": "user", "content": [image(3), "a plain string", image(0)]},
        ],
        "temperature": "left to the engine",
    }
    before = copy.deepcopy(body)
    found = run(CHAT, body)
    assert body == before
    assert [part.place for part in found.parts] == [
        "messages[0].content[0]",
        "messages[3].content[1]",
        "messages[3].content[2]",
        "messages[4].content[0]",
        "messages[4].content[2]",
    ]
    assert found.body["temperature"] == "left to the engine"
    assert found.body["messages"][4]["content"][1] == "a plain string"


def test_responses_tool_outputs_hold_media_too() -> None:
    body = {
        "input": [
            {"type": "message", "role": "user", "content": "look"},
            {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "1",
                "output": [{"type": "input_image", "image_url": URL}],
            },
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text"}]},
        ]
    }
    assert [part.place for part in run(RESPONSES, body).parts] == ["input[2].output[0]"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (RESPONSES, {"input": "text"}),
        (COMPLETIONS, {"prompt": "text"}),
        (COMPLETIONS, {"prompt": ["a", "b"]}),
        (COMPLETIONS, {"prompt": [1, 2]}),
        (COMPLETIONS, {"prompt": [7] * 4000}),
        (COMPLETIONS, {"prompt": ["a"] * 128}),
        (CHAT, chat(TEXT, kv_transfer_params=None)),
    ],
)
def test_bodies_without_media(route: str, body: dict[str, Any]) -> None:
    found = run(route, body)
    assert (found.body, found.parts) == (body, [])


def test_a_uuid_is_dropped_from_text_too() -> None:
    """vLLM reads a part that has one by its keys, whatever its type says."""
    found = run(CHAT, chat({**TEXT, "uuid": "mine"}))
    assert found.body["messages"][0]["content"] == [TEXT]


@pytest.mark.parametrize(
    ("given", "taken"), [(None, {}), ({"max_pixels": 1}, {"max_pixels": 1}), ("absent", {})]
)
def test_processor_arguments_leave_the_body(given: Any, taken: dict[str, Any]) -> None:
    body = chat(TEXT) if given == "absent" else chat(TEXT, mm_processor_kwargs=given)
    found = run(CHAT, body)
    assert found.processor_args == taken
    assert "mm_processor_kwargs" not in found.body


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (CHAT, [], "body"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": None}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": {"role": "user"}}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": ["hi"]}, "messages[0]"),
        (CHAT, {"messages": [{"content": 5}]}, "messages[0].content"),
        (CHAT, {"messages": [{"content": {"type": "text"}}]}, "messages[0].content"),
        (CHAT, chat(5), "messages[0].content[0]"),
        (CHAT, chat(None), "messages[0].content[0]"),
        (CHAT, chat([TEXT]), "messages[0].content[0]"),
        (CHAT, chat({}), "messages[0].content[0].type"),
        (CHAT, chat({"image_url": URL}), "messages[0].content[0].type"),
        (CHAT, chat({"type": ["text"]}), "messages[0].content[0].type"),
        (CHAT, chat({"type": "hologram"}), "messages[0].content[0].type"),
        (CHAT, chat({"type": "image_pil"}), "messages[0].content[0].type"),
        (CHAT, chat({"type": "text", "text": 5}), "messages[0].content[0].text"),
        (CHAT, chat({**TEXT, "image": "x"}), "messages[0].content[0]"),
        (CHAT, chat({**TEXT, "image_url": URL}), "messages[0].content[0]"),
        (CHAT, chat({"type": "image_url"}), "messages[0].content[0].image_url"),
        (
            CHAT,
            chat({"type": "image_url", "image_url": {}}),
            "messages[0].content[0].image_url.url",
        ),
        (CHAT, chat({"type": "image_url", "image_url": [URL]}), "messages[0].content[0].image_url"),
        (CHAT, chat({"type": "image_url", "image_url": " "}), "messages[0].content[0].image_url"),
        (CHAT, chat(TEXT, {"type": "input_image"}), "messages[0].content[1].image_url"),
        (CHAT, chat({"type": "input_image", "file_id": 7}), "messages[0].content[0].file_id"),
        (
            CHAT,
            chat({"type": "input_image", "file_id": "f", "image_url": URL}),
            "messages[0].content[0]",
        ),
        (CHAT, chat({"type": "image_file"}), "messages[0].content[0].image_file"),
        (
            CHAT,
            chat({"type": "image_file", "image_file": {}}),
            "messages[0].content[0].image_file.file_id",
        ),
        (CHAT, chat({"type": "media_ref"}), "messages[0].content[0].item"),
        (CHAT, chat({"type": "media_ref", "item": True}), "messages[0].content[0].item"),
        (CHAT, chat(TEXT, mm_processor_kwargs=[1]), "mm_processor_kwargs"),
        (CHAT, chat(TEXT, mm_processor_kwargs={"max_pixels": 0}), "mm_processor_kwargs.max_pixels"),
        (
            CHAT,
            chat(TEXT, mm_processor_kwargs={"min_pixels": 2**64}),
            "mm_processor_kwargs.min_pixels",
        ),
        (CHAT, chat(TEXT, mm_processor_kwargs={"size": "x"}), "mm_processor_kwargs.size"),
        (CHAT, chat(TEXT, mm_processor_kwargs={"size": {"width": 1}}), "mm_processor_kwargs.size"),
        (
            CHAT,
            chat(TEXT, mm_processor_kwargs={"size": {"longest_edge": True}}),
            "mm_processor_kwargs.size.longest_edge",
        ),
        (CHAT, chat(TEXT, tools=nested(5000)), "body"),
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": 5}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 129}, "prompt"),
        (COMPLETIONS, {"prompt": [[1]] * 129}, "prompt"),
        (COMPLETIONS, {"prompt": [1, *["a"] * 200_000]}, "prompt"),
        (RESPONSES, {}, "input"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [7]}, "input[0]"),
        (RESPONSES, {"input": [{"content": [{}]}]}, "input[0].content[0].type"),
        (RESPONSES, {"input": [{"output": {"type": "computer_screenshot"}}]}, "input[0].output"),
        ("/v1/embeddings", {"input": "x"}, "route"),
    ],
)
def test_wrong_shapes_are_refused_by_name(route: str, body: Any, param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        run(route, body)
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)
    assert caught.value.stage == "ingest"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (chat(TEXT, ec_transfer_params={}), "ec_transfer_params", "reserved_field"),
        (chat(TEXT, kv_transfer_params={"a": 1}), "kv_transfer_params", "reserved_field"),
        (chat(TEXT, vllm_xargs={"a": 1}), "vllm_xargs", "reserved_field"),
        (chat(TEXT, prompt_embeds="AA=="), "prompt_embeds", "reserved_field"),
        (chat(TEXT, media_io_kwargs={"image": {}}), "media_io_kwargs", "unsupported_parameter"),
        *(
            (chat(TEXT, {"type": name, name: "AA=="}), "messages[0].content[1]", "reserved_field")
            for name in ("image_embeds", "audio_embeds", "video_embeds", "prompt_embeds")
        ),
        (chat({**TEXT, "image_embeds": ""}), "messages[0].content[0]", "reserved_field"),
        (chat({**IMAGE, "image_embeds": ""}), "messages[0].content[0]", "reserved_field"),
        *(
            (chat({"type": name, name: {}}), "messages[0].content[0]", "modality_not_supported")
            for name in ("input_video", "input_file")
        ),
        *(
            (chat({"type": name, name: {}}), f"messages[0].content[0].{name}.{field}", INVALID)
            for name, field in (("video_url", "url"), ("audio_url", "url"), ("input_audio", "data"))
        ),
        (chat({"type": "input_audio"}), "messages[0].content[0].input_audio", INVALID),
    ],
)
def test_what_is_refused(body: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        run(CHAT, body)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, param)


def test_internal_fields_are_refused_on_every_route() -> None:
    for route, body in ((COMPLETIONS, {"prompt": "x"}), (RESPONSES, {"input": "x"})):
        with pytest.raises(BadRequestError) as caught:
            run(route, {**body, "prompt_embeds": "x"})
        assert caught.value.code == "reserved_field"


def test_too_many_items() -> None:
    run(CHAT, chat(*[IMAGE] * 3), max_items=3)
    with pytest.raises(TooLargeError) as caught:
        run(CHAT, chat(*[IMAGE] * 4), max_items=3)
    assert (caught.value.status, caught.value.code) == (413, "too_many_items")
    assert caught.value.param == "messages[0].content[3]"


@pytest.mark.parametrize("name", ["patch_size", "merge_size", "temporal_patch_size", "device"])
def test_arguments_that_change_shapes_are_not_the_clients(name: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        run(CHAT, chat(TEXT, mm_processor_kwargs={name: 7}))
    assert caught.value.code == "unsupported_parameter"
    assert caught.value.param == f"mm_processor_kwargs.{name}"


def test_messages_and_parts_are_bounded_together() -> None:
    message = {"role": "user", "content": [TEXT]}
    assert run(CHAT, {"messages": [message] * 2048}).parts == []
    with pytest.raises(TooLargeError) as caught:
        run(CHAT, {"messages": [message] * 2049})
    assert (caught.value.code, caught.value.param) == ("too_many_parts", "messages")


def test_a_prompt_with_pictures_is_not_truncated() -> None:
    body = chat({"type": "image_url", "image_url": {"url": "https://host/a.png"}})
    assert len(run(CHAT, body).parts) == 1
    assert run(CHAT, chat(TEXT, truncate_prompt_tokens=5)).parts == []
    with pytest.raises(BadRequestError) as caught:
        run(CHAT, body | {"truncate_prompt_tokens": 5})
    assert caught.value.param == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("args", "param"),
    [
        ({"min_pixels": (1 << 20) + 1}, "mm_processor_kwargs.min_pixels"),
        ({"max_pixels": (1 << 24) + 1}, "mm_processor_kwargs.max_pixels"),
        ({"size": {"shortest_edge": (1 << 20) + 1}}, "mm_processor_kwargs.size.shortest_edge"),
        ({"size": {"longest_edge": 10**9}}, "mm_processor_kwargs.size.longest_edge"),
        ({"min_pixels": 0}, "mm_processor_kwargs.min_pixels"),
    ],
)
def test_sizes_that_would_take_all_memory(args: dict[str, Any], param: str) -> None:
    """A picture of one pixel is blown up to the least size that is asked for."""
    with pytest.raises(BadRequestError) as caught:
        run(CHAT, chat(IMAGE, mm_processor_kwargs=args))
    assert caught.value.param == param


def test_the_largest_sizes_pass() -> None:
    args = {"min_pixels": 1 << 20, "size": {"shortest_edge": 1 << 20, "longest_edge": 1 << 24}}
    assert run(CHAT, chat(IMAGE, mm_processor_kwargs=args)).processor_args == args


def test_input_audio_as_a_data_uri() -> None:
    uri = "data:audio/wav;base64,AAAA"
    [media] = run(CHAT, chat({"type": "input_audio", "input_audio": {"data": uri}})).parts
    assert media.source == UrlSource(uri)
