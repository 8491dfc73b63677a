"""The documents on the protocol say what the code does: docs/protocol.md, docs/asyncapi.json, the example."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgpack
import msgspec
import pytest

from epd_common.bus import Bus, delivery, streams
from epd_common.protocol import (
    GenerateJob,
    Handover,
    Item,
    ItemReceipt,
    Locator,
    Media,
    Receipt,
    decode,
    encode,
    subjects,
)
from epd_common.protocol.asyncapi import main as asyncapi_main
from epd_common.protocol.asyncapi import render
from epd_common.protocol.codec import MESSAGES
from epd_common.protocol.jobs import MAX_INLINE_BYTES
from epd_common.protocol.keys import digest, embedding_key
from epd_common.protocol.lanes import encode_lane, generate_lane
from epd_common.protocol.replies import Reply
from fake_engine import answer_text
from service_stack import ServiceStack, bare_stack, eventually, picture

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "protocol.md").read_text()
ROW = re.compile(r"^\| `([a-z_]+)` \|([^|]+)\|([^|]*)\|", re.MULTILINE)


def section(title: str) -> str:
    """The text below a heading, up to the next one of any level."""
    found = re.search(rf"^#+ {title}\n(.*?)(?=^#+ |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/protocol.md has no section {title!r}"
    return found[1]


def described(title: str) -> dict[str, tuple[str, str]]:
    """The fields in a section's table: type and default."""
    rows = ROW.findall(section(title))
    assert len({name for name, *_ in rows}) == len(rows)
    return {name: (kind.strip(), default.strip().strip("`")) for name, kind, default in rows}


def kind_of(annotation: Any) -> str:
    """A Python type in the words of the page."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "str"
    if origin in (Union, types.UnionType):
        return " or ".join(kind_of(part) for part in inner)
    if origin is list:
        return f"array of {kind_of(inner[0])}"
    if origin is dict:
        return "map"
    names = {bytes: "bin", type(None): "nil"}
    return names.get(annotation) or str(annotation.__name__)


def defined(struct: type[msgspec.Struct]) -> dict[str, tuple[str, str]]:
    """The fields of a message as the code has them, in the words of the page."""
    hints = get_type_hints(struct)
    found = {}
    for field in msgspec.structs.fields(struct):
        default: Any = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if default is msgspec.NODEFAULT:
            text = ""
        elif default is None:
            text = "nil"
        elif default in ("", b"", [], {}):
            text = "empty"
        else:
            text = f"{default:g}" if isinstance(default, float) else str(default)
        found[field.name] = (kind_of(hints[field.name]), text)
    return found


# -- docs/protocol.md ----------------------------------------------------------------------------


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.__struct_config__.tag)
def test_page_has_every_field_of_every_message(message: type[msgspec.Struct]) -> None:
    expected = defined(message)
    assert described("Messages")["v"] == (expected.pop("v")[0], "1")
    if issubclass(message, Reply):
        for name, text in described("Reply frames").items():
            assert expected.pop(name) == text
    assert described(str(message.__struct_config__.tag)) == expected


@pytest.mark.parametrize("part", [Handover, Item, ItemReceipt, Locator, Media, Receipt])
def test_page_has_every_field_of_every_part(part: type[msgspec.Struct]) -> None:
    assert described(part.__name__) == defined(part)


def test_page_has_every_subject() -> None:
    rows = section("Subjects")
    for subject in (
        subjects.encode_subject("MODEL", "LANE"),
        subjects.generate_subject("MODEL", "LANE", "PLACE"),
        subjects.ready_subject("KEY"),
        subjects.cancel_subject("REQUEST"),
        subjects.replay_subject("REQUEST"),
        subjects.explain_subject("REQUEST"),
        subjects.held_subject("WORKER"),
        subjects.dlq_subject("STAGE"),
        f"$KV.{subjects.WORKERS_BUCKET}.{subjects.worker_key('ROLE', 'WORKER')}",
        "epd.v1.health.WORKER",
    ):
        named = re.sub(r"[A-Z]{3,}", lambda word: f"<{word[0].lower()}>", subject)
        assert f"| `{named}` |" in rows


def test_examples_of_model_tokens() -> None:
    rows = re.findall(r"^\| `([^`<]+)` \| `([^`]+)` \|$", section("Subjects"), re.MULTILINE)
    assert len(rows) == 4
    for name, token in rows:
        assert subjects.model_token(name) == token


def test_table_of_lanes() -> None:
    rows = re.findall(r"^\| `(l\d)` \|([^|]+)\|([^|]+)\|$", PAGE, re.MULTILINE)
    assert [lane for lane, *_ in rows] == list(subjects.LANES)
    for lane, nth, items in rows:
        for number in numbers(nth):
            assert encode_lane(number - 1) == lane
        for number in numbers(items):
            assert generate_lane(number) == lane


def numbers(text: str) -> list[int]:
    """The ends of a range, if it is one; the last is far away where it has none."""
    found = [int(number) for number in re.findall(r"\d+", text)]
    return [*found, 99] if len(found) == 1 else found


def test_worked_example_of_a_key() -> None:
    text, result = re.findall(r"```\n(epd-key-1\nimage\n.*?)\n```.*?`([0-9a-f]{64})`", PAGE, re.S)[
        0
    ]
    _, modality, media_digest, fingerprint, scope, arguments = text.split("\n")
    assert media_digest == digest(b"epdflow")
    assert fingerprint == "0123456789abcdef" * 4
    key = embedding_key(
        media_digest=media_digest,
        fingerprint=fingerprint,
        modality=modality,
        processor_args=json.loads(arguments),
        scope=scope,
    )
    assert key == result == digest(text.encode())


def test_numbers_on_the_page() -> None:
    for text in (
        f"{MAX_INLINE_BYTES} bytes (512 KiB)",
        f"silent for {streams.ACK_WAIT_S:g} s",
        f"delivered {streams.MAX_DELIVERIES} times",
        f"duplicate window {streams.DUPLICATE_WINDOW_S:g} s",
        f"newest {streams.DLQ_MAX_MESSAGES}, for {streams.DLQ_MAX_AGE_S / 86400:g} days",
        f"drops records after {streams.WORKERS_TTL_S:g} s",
    ):
        assert text in PAGE
    assert delivery.HEARTBEAT_S < streams.ACK_WAIT_S / 2


def test_links_of_the_page_lead_somewhere() -> None:
    anchors = {
        title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert target[1:] in anchors if target.startswith("#") else (DOCS / target).exists(), target


# -- docs/asyncapi.json --------------------------------------------------------------------------


def test_asyncapi_file_is_up_to_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asyncapi_main(["--check", str(DOCS / "asyncapi.json")]) == 0
    other = tmp_path / "asyncapi.json"
    assert asyncapi_main(["--check", str(other)]) == 1, "missing"
    other.write_text(render().replace("l0", "l9"))
    assert asyncapi_main(["--check", str(other)]) == 1, "changed"
    assert "not up to date" in capsys.readouterr().err
    assert asyncapi_main([str(other)]) == 0
    assert asyncapi_main(["--check", str(other)]) == 0


DOCUMENT: dict[str, Any] = json.loads((DOCS / "asyncapi.json").read_text())


def resolve(reference: str) -> Any:
    found: Any = DOCUMENT
    for name in reference.removeprefix("#/").split("/"):
        found = found[name]
    return found


def references(value: Any) -> list[str]:
    if isinstance(value, list):
        return [found for inner in value for found in references(inner)]
    if not isinstance(value, dict):
        return []
    here = [value["$ref"]] if "$ref" in value else []
    return here + [found for inner in value.values() for found in references(inner)]


def test_asyncapi_structure() -> None:
    """What AsyncAPI 3.0 demands of the objects that are used here."""
    assert DOCUMENT["asyncapi"] == "3.0.0"
    assert set(DOCUMENT) <= {
        *("asyncapi", "id", "info", "servers", "defaultContentType"),
        *("channels", "operations", "components"),
    }
    assert DOCUMENT["info"]["title"] and DOCUMENT["info"]["version"]
    for reference in references(DOCUMENT):
        resolve(reference)
    for name, channel in DOCUMENT["channels"].items():
        assert re.fullmatch(r"[\w.-]+", name)
        in_address = set(re.findall(r"\{(\w+)\}", channel["address"]))
        assert in_address == set(channel["parameters"]), channel["address"]
        for parameter in channel["parameters"].values():
            assert set(parameter) <= {"enum", "default", "description", "examples", "location"}
        assert channel["messages"]
        assert all(set(message) == {"$ref"} for message in channel["messages"].values())
    for operation in DOCUMENT["operations"].values():
        assert operation["action"] in ("send", "receive")
        channel_ref = operation["channel"]["$ref"]
        assert channel_ref.startswith("#/channels/")
        for message in operation["messages"]:  # of its own channel, by the channel's name for it
            assert message["$ref"].startswith(f"{channel_ref}/messages/")
    for message in DOCUMENT["components"]["messages"].values():
        assert {"name", "title", "payload"} <= set(message)


def test_asyncapi_has_every_message_in_a_channel_and_every_stream() -> None:
    used = {name for channel in DOCUMENT["channels"].values() for name in channel["messages"]}
    tags = {str(message.__struct_config__.tag) for message in MESSAGES}
    assert (
        used
        == set(DOCUMENT["components"]["messages"])
        == tags | {f"{asked}{kind}" for asked in ("health", "explain") for kind in ("", "Request")}
    )
    acted = {
        ref.split("/")[-1] for ref in references(DOCUMENT["operations"]) if "/messages/" in ref
    }
    assert acted == used
    nats = [channel["x-nats"] for channel in DOCUMENT["channels"].values()]
    assert {entry.get("stream") for entry in nats} >= {"EPD_ENCODE", "EPD_GENERATE", "EPD_DLQ"}
    assert {entry.get("bucket") for entry in nats} >= {subjects.WORKERS_BUCKET}
    addresses = {channel["address"] for channel in DOCUMENT["channels"].values()}
    assert "epd.v1.generate.{model}.{lane}.{place}" in addresses
    assert f"$KV.{subjects.WORKERS_BUCKET}.{{role}}.{{worker}}" in addresses


def test_asyncapi_schemas_know_bytes_tags_and_versions() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for message in MESSAGES:
        schema = schemas[message.__name__]
        assert schema["properties"]["t"] == {"enum": [message.__struct_config__.tag]}
        assert schema["properties"]["v"]["const"] == 1
        assert {"t", "v"} <= set(schema["required"])
    assert "base64" not in json.dumps(schemas)
    assert schemas["ReplyData"]["properties"]["data"]["x-msgpack"] == "bin"


# -- docs/examples/direct_nats.py ----------------------------------------------------------------

EXAMPLE = DOCS / "examples" / "direct_nats.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("direct_nats", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example_imports_nats_msgpack_and_the_standard_library() -> None:
    imported = set()
    for node in ast.walk(ast.parse(EXAMPLE.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported - sys.stdlib_module_names == {"nats", "msgpack"}


def test_example_makes_the_right_job(example: Any) -> None:
    job = decode(
        msgpack.packb(
            example.generate_job(
                model="o/m", text="what?", pictures=[b"one", b"two"], inbox="_I", timeout_s=9
            )
        ),
        GenerateJob,
    )
    assert job.items == [Item(media=Media(inline=b"one")), Item(media=Media(inline=b"two"))]
    assert (job.model, job.route, job.inbox) == ("o/m", "/v1/chat/completions", "_I")
    content = json.loads(job.body)["messages"][0]["content"]
    assert [part.get("item") for part in content] == [0, 1, None]
    for name in ("qwen2-vl", "Qwen/Qwen2.5-VL-7B", "a=b c", "模"):
        assert example.model_token(name) == subjects.model_token(name)
    assert all(example.lane(n) == generate_lane(n) for n in range(30))
    assert example.MAX_INLINE_BYTES == MAX_INLINE_BYTES
    # Small bodies of the two writers are equal, so nothing was left to a lenient reader.
    assert msgpack.unpackb(encode(job))["items"][0]["media"]["inline"] == b"one"


@pytest.fixture(scope="module")
async def direct_stack(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    async with bare_stack(nats_url, redis_url, tmp_path_factory.mktemp("direct")) as stack:
        await stack.add_encoder()
        await stack.add_pd()
        await stack.add_gateway()
        await stack.ready()
        yield stack


async def run_example(stack: ServiceStack, url: str, *arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", str(EXAMPLE), "--nats", url, "--timeout", "20"),
        *("--model", stack.model, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_example_prints_an_answer(
    direct_stack: ServiceStack, nats_url: str, tmp_path: Path
) -> None:
    one, two = picture(), picture()
    for name, data in (("one", one), ("two", two)):
        (tmp_path / name).write_bytes(data)
    code, out, err = await run_example(
        direct_stack, nats_url, "say it", str(tmp_path / "one"), str(tmp_path / "two")
    )
    assert (code, out, err) == (0, answer_text("say it", one, two) + "\n", "")


async def test_example_prints_an_error(
    direct_stack: ServiceStack, nats_url: str, tmp_path: Path
) -> None:
    (tmp_path / "broken").write_bytes(picture()[:40])
    code, out, err = await run_example(direct_stack, nats_url, "x", str(tmp_path / "broken"))
    assert (code, out) == (1, "")
    assert err.startswith("400 ") and "items[0]" in err


async def test_example_cancels_when_it_is_given_up(
    direct_stack: ServiceStack, nats_url: str, example: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = direct_stack.pds[0].engine
    engine.gate.clear()
    async with Bus(nats_url, name="direct") as bus:
        asking = asyncio.create_task(example.ask(bus.client, direct_stack.model, "x", [], 20))
        try:
            await eventually(lambda: bool(engine.running), "the engine works on it")
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await eventually(lambda: not engine.running, "the request was aborted")
        finally:
            engine.gate.set()


async def test_example_finds_the_model_in_the_registry(
    direct_stack: ServiceStack, nats_url: str, example: Any
) -> None:
    async with Bus(nats_url, name="direct") as bus:

        async def there() -> bool:
            # A record that is replaced while the bucket is read can be missing for a moment.
            return direct_stack.model in await example.ready_models(bus.client)

        await eventually(there, "the example finds the model")


def frame(t: str, attempt: int, seq: int, **fields: Any) -> dict[str, Any]:
    return {"t": t, "v": 1, "request_id": "r", "attempt": attempt, "seq": seq, **fields}


def arrived(*given: dict[str, Any]) -> asyncio.Queue[Any]:
    queue: asyncio.Queue[Any] = asyncio.Queue()
    for each in given:
        queue.put_nowait(types.SimpleNamespace(data=msgpack.packb(each)))
    return queue


async def test_example_reads_frames_by_the_rules(example: Any) -> None:
    head, end = frame("head", 2, 0), frame("end", 2, 2)
    given = arrived(
        frame("head", 1, 0),
        head | {"request_id": "other"},
        head,
        frame("data", 1, 1),  # of the attempt before
        head,  # doubled
        head | {"v": 2},
        frame("data", 2, 1),
        end,
    )
    seen = [f async for f in example.frames(given, "r", 5)]
    assert seen == [frame("head", 1, 0), head, frame("data", 2, 1), end]
    for lost in (
        arrived(head, frame("data", 2, 2)),
        arrived(head, frame("data", 2, 1), frame("head", 3, 0)),
    ):
        with pytest.raises(SystemExit, match="send the request again"):
            [f async for f in example.frames(lost, "r", 5)]
