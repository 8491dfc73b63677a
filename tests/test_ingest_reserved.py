"""No text that a template renders may hold a reserved token, however it gets there."""

from __future__ import annotations

from typing import Any

import pytest

from epd_common.errors import BadRequestError
from epd_common.ingest.body import CHAT, COMPLETIONS, RESPONSES
from epd_common.ingest.reserved import check_reserved

PAD = "<|image_pad|>"
TOKENS = [PAD, "<|vision_start|>", "<|im_end|>", "<IMG_CONTEXT>", ""]


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}, {"role": "user", **fields}]}


def call(arguments: Any, name: str = "f") -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return message(content=None, tool_calls=[tool])


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": part} for part in texts]


ARGUMENTS = "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (message(content=f"a{PAD}b"), "messages[1].content"),
        (message(content="a <|im_end|>"), "messages[1].content"),
        (message(content=text("a", PAD)), "messages[1].content[1].text"),
        (message(content=["a", PAD]), "messages[1].content[1]"),
        (message(content=text("<|image", "_pad|>")), "messages[1].content"),
        (message(content=["<|image_", *text("pa"), "d|>"]), "messages[1].content"),
        (
            message(content=[*text("<|image"), {"type": "media_ref", "item": 0}, *text("_pad|>")]),
            "messages[1].content",
        ),
        (message(role=f"user{PAD}"), "messages[1].role"),
        (message(name=PAD), "messages[1].name"),
        (message(reasoning=PAD), "messages[1].reasoning"),
        (message(reasoning_content=PAD), "messages[1].reasoning_content"),
        (
            message(content=[{"type": "thinking", "thinking": PAD}]),
            "messages[1].content[0].thinking",
        ),
        (call(f'{{"a": "{PAD}"}}'), ARGUMENTS),
        (call('{"a": "\\u003c|image_pad|\\u003e"}'), f"{ARGUMENTS}.a"),
        (call('{"\\u003c|image_pad|\\u003e": 1}'), ARGUMENTS),
        (call({"a": [{"b": PAD}]}), f"{ARGUMENTS}.a[0].b"),
        (call("{}", name=PAD), "messages[1].tool_calls[0].function.name"),
        (
            {"messages": [], "tools": [{"function": {"description": PAD}}]},
            "tools[0].function.description",
        ),
        ({"messages": [], "tools": [{"properties": {PAD: {}}}]}, "tools[0].properties"),
        ({"messages": [], "documents": [{"text": PAD}]}, "documents[0].text"),
        ({"messages": [], "chat_template_kwargs": {"a": PAD}}, "chat_template_kwargs.a"),
    ],
)
def test_chat(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError, match="reserved") as caught:
        check_reserved(CHAT, body, TOKENS)
    assert (caught.value.status, caught.value.code) == (400, "reserved_token")
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": PAD}, "input"),
        ({"input": "x", "instructions": PAD}, "instructions"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": PAD}]}]},
            "input[0].content[0].text",
        ),
        ({"input": [{"type": "function_call_output", "output": PAD}]}, "input[0].output"),
    ],
)
def test_responses(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        check_reserved(RESPONSES, body, TOKENS)
    assert (caught.value.code, caught.value.param) == ("reserved_token", param)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (PAD, "prompt"),
        ("<|vision_start|>", "prompt"),
        (["fine", "a<IMG_CONTEXT>"], "prompt[1]"),
    ],
)
def test_a_raw_prompt_may_not_hold_media_tokens(prompt: Any, param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        check_reserved(COMPLETIONS, {"prompt": prompt}, TOKENS)
    assert (caught.value.code, caught.value.param) == ("reserved_token", param)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (COMPLETIONS, {"prompt": "<|im_start|>user\nhi<|im_end|>\n"}),
        (COMPLETIONS, {"prompt": [1, 2, 3]}),
        (CHAT, {"messages": [{"content": "image_pad < | <|image pad|>"}], "stop": ["<|im_end|>"]}),
        (CHAT, {"messages": [], "tools": [{"anyOf": [{"type": ["string", "null"]}, None, 5]}]}),
        (CHAT, message(tool_calls=[{"function": {"arguments": "not JSON {"}}])),
        (RESPONSES, {"input": "plain"}),
    ],
)
def test_what_passes(route: str, body: dict[str, Any]) -> None:
    check_reserved(route, body, TOKENS)


def test_a_model_without_reserved_tokens() -> None:
    check_reserved(CHAT, message(content=PAD), [])


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([1, 71], "prompt[1]"),
        ([[1], [2, 72]], "prompt[1][1]"),
        ([1, 71.0], "prompt[1]"),  # vLLM takes both for the id
        ([1, " 71"], "prompt[1]"),
        ([["71"], [1]], "prompt[0][0]"),
    ],
)
def test_ids_of_media_tokens_in_a_raw_prompt(prompt: object, param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        check_reserved(COMPLETIONS, {"prompt": prompt}, TOKENS, [71, 72, 73, 74, 75])
    assert (caught.value.code, caught.value.param) == ("reserved_token", param)


@pytest.mark.parametrize("prompt", [[1, 73], "71", ["71", "x"], [], 71, [["73"], [1]]])
def test_other_ids_and_texts_of_a_raw_prompt(prompt: object) -> None:
    check_reserved(COMPLETIONS, {"prompt": prompt}, TOKENS, [71, 72, 73, 74, 75])
