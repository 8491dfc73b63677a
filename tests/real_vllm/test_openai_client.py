"""The official client against the gateway, and the same calls against a colocated vLLM server."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from typing import Any

import openai
import pytest
from deployment import SMALL_MODEL, Deployment

from models import shapes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "paint",
            "description": "Paints a shape.",
            "strict": True,  # the arguments follow the schema, whatever the model would write
            "parameters": {
                "type": "object",
                "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
                "required": ["colour"],
            },
        },
    }
]
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_completion_tokens": {"max_completion_tokens": 3},
    "stop": {"stop": [" on"]},
    "seed": {"seed": 5, "temperature": 0.7},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "n": {"n": 2, "temperature": 0.5, "seed": 3},
    "named tool": {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "paint"}},
        "max_tokens": 128,
        "frequency_penalty": 1.5,  # or the model, which knows no JSON, writes white space for ever
    },
    "tools offered": {"tools": TOOLS, "tool_choice": "auto"},
    "json schema": {"response_format": SCHEMA},
    "json object": {"response_format": {"type": "json_object"}, "max_tokens": 8},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "top_p": 0.9},
}


def messages() -> list[Any]:
    rng = random.Random(4)
    scenes = [shapes.random_scene(rng) for _ in range(2)]
    parts: list[Any] = [
        {
            "type": "image_url",
            "image_url": {"url": shapes.data_uri(shapes.draw(s, 84, 112, rng)), "detail": "auto"},
        }
        for s in scenes
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Describe image #2."}]}]


def shape(value: Any) -> Any:
    """The structure of a JSON value: keys and types, numbers and strings left out."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner) for inner in value]
    return type(value).__name__


@pytest.mark.parametrize("variant", VARIANTS)
async def test_every_option_answers_as_colocated(small: Deployment, variant: str) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 24} | VARIANTS[variant]
    if "max_completion_tokens" in options:
        del options["max_tokens"]
    answers = []
    for url in (small.url, small.colocated_url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            answer = await client.chat.completions.create(
                model=small.name, messages=messages(), **options
            )
            answers.append(answer.model_dump(exclude={"id", "created", "system_fingerprint"}))
    ours, theirs = answers
    assert shape(ours) == shape(theirs)
    assert ours["usage"] == theirs["usage"]
    for mine, other in zip(ours["choices"], theirs["choices"], strict=True):
        assert mine["finish_reason"] == other["finish_reason"]
        assert mine["message"]["content"] == other["message"]["content"]
        calls = [
            [call["function"] for call in choice["message"].get("tool_calls") or []]
            for choice in (mine, other)
        ]
        assert calls[0] == calls[1]
    if variant == "named tool":
        assert ours["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "paint"
    if variant == "n":
        assert len(ours["choices"]) == 2
    if variant == "json schema":
        assert ours["choices"][0]["message"]["content"].lstrip().startswith("{")


async def test_async_stream_with_usage(small: Deployment) -> None:
    async with openai.AsyncOpenAI(base_url=f"{small.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model=small.name,
            messages=messages(),
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        whole = await client.chat.completions.create(
            model=small.name, messages=messages(), max_tokens=24, temperature=0
        )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert len(chunks) > 4


def sync_calls(url: str, model: str) -> tuple[str, str, list[str]]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        whole = client.chat.completions.create(
            model=model, messages=messages(), max_tokens=24, temperature=0
        )
        with client.chat.completions.create(
            model=model, messages=messages(), max_tokens=24, temperature=0, stream=True
        ) as stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        return whole.choices[0].message.content or "", text, [m.id for m in client.models.list()]


async def test_sync_client(small: Deployment) -> None:
    whole, streamed, models = await asyncio.to_thread(sync_calls, small.url, small.name)
    assert whole == streamed
    assert whole.startswith("Image #2 shows")
    assert models == [small.name]


async def test_completions(small: Deployment) -> None:
    answers = []
    for url in (small.url, small.colocated_url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            answer = await client.completions.create(
                model=small.name, prompt="How many images", max_tokens=6, temperature=0, logprobs=1
            )
            answers.append(answer.model_dump(exclude={"id", "created", "system_fingerprint"}))
    assert answers[0] == answers[1]


async def test_a_priority_reaches_the_engine(small: Deployment) -> None:
    """An engine that schedules by arrival alone refuses any but 0."""
    answers = []
    async with openai.AsyncOpenAI(base_url=f"{small.url}/v1", api_key="none") as client:
        for priority in (0, -3, 4):
            answer = await client.chat.completions.create(
                model=small.name,
                messages=messages(),
                max_tokens=16,
                temperature=0,
                extra_body={"priority": priority},
            )
            answers.append(answer.choices[0].message.content)
    assert answers[0]
    assert len(set(answers)) == 1


async def test_files_are_encoded_at_upload_and_reused(small: Deployment) -> None:
    rng = random.Random(6)
    scene = shapes.random_scene(rng)
    uri = shapes.data_uri(shapes.draw(scene, 140, 84, rng))
    data = base64.b64decode(uri.partition(",")[2])
    async with openai.AsyncOpenAI(base_url=f"{small.url}/v1", api_key="none") as client:
        file = await client.files.create(file=("a.png", data), purpose="vision")
        for part in (
            {"type": "image_file", "image_file": {"file_id": file.id}},
            {"type": "input_image", "file_id": file.id},
        ):
            content: Any = [part, {"type": "text", "text": "What is in image #1?"}]
            response = await client.chat.completions.with_raw_response.create(
                model=small.name,
                messages=[{"role": "user", "content": content}],
                max_tokens=16,
                temperature=0,
            )
            assert response.headers["x-epd-items"] in ("shared", "reused")
            answer = response.parse().choices[0].message.content
            assert answer == f"a {scene.colour} {scene.shape}"


async def test_errors_are_the_clients_own(small: Deployment) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{small.url}/v1", api_key="none", max_retries=0
    ) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="nope", messages=messages())
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model=small.name, messages=messages(), temperature=-1
            )
        assert refused.value.status_code == 400
        with pytest.raises(openai.BadRequestError, match="reserved"):
            await client.chat.completions.create(
                model=small.name, messages=[{"role": "user", "content": "<|image_pad|>"}]
            )
        tokens = json.loads((SMALL_MODEL / "tokenizer.json").read_text())["added_tokens"]
        (pad,) = (token["id"] for token in tokens if token["content"] == "<|image_pad|>")
        with pytest.raises(openai.BadRequestError, match="stands for media"):
            await client.completions.create(model=small.name, prompt=[5, pad], max_tokens=1)
