"""Ask an epdflow cluster about pictures over NATS alone, with no gateway and none of epdflow's code.

    pip install nats-py msgpack
    python direct_nats.py "What is in image #1?" picture.png     # where `epd up` runs
    python direct_nats.py --nats nats://user:password@host:4222 "What is in image #1?" picture.png
    python direct_nats.py --nats nats://client:password@host:4222 --inbox-prefix _INBOX.client "Hello"

It publishes one generate job, with the pictures inline, and prints the answer as its frames arrive.
The messages are described in ``docs/protocol.md``.
"""

import argparse
import asyncio
import json
import re
import secrets
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import NoKeysError

MAX_INLINE_BYTES = 512 * 1024


def model_token(name: str) -> str:
    """A model's name as one token of a subject."""
    return re.sub(rb"[^A-Za-z0-9_-]", lambda m: b"=%02X" % m[0][0], name.encode()).decode()


def lane(items: int) -> str:
    """The lane of a generate job with so many pictures."""
    return f"l{sum(items > bound for bound in (2, 6, 14))}"


def generate_job(
    *, model: str, text: str, pictures: list[bytes], inbox: str, timeout_s: float
) -> dict[str, Any]:
    """The message. A raw item has its bytes and nothing else; the worker does the rest."""
    parts: list[dict[str, Any]] = [{"type": "media_ref", "item": n} for n in range(len(pictures))]
    parts.append({"type": "text", "text": text})
    body = {
        "model": model,
        "messages": [{"role": "user", "content": parts}],
        "stream": True,
        "max_tokens": 64,
        "temperature": 0,
    }
    return {
        "t": "generate",
        "v": 1,
        "request_id": secrets.token_hex(16),
        "model": model,
        "route": "/v1/chat/completions",
        "body": json.dumps(body).encode(),
        "items": [{"modality": "image", "media": {"inline": picture}} for picture in pictures],
        "inbox": inbox,
        "deadline": time.time() + timeout_s,
    }


async def ready_models(client: Client) -> list[str]:
    """The models that a PD worker serves now, from the registry."""
    bucket = await client.jetstream().key_value("epd_workers")
    try:
        names = [name for name in await bucket.keys() if name.startswith("pd.")]
    except NoKeysError:
        return []
    records = [msgpack.unpackb((await bucket.get(name)).value) for name in names]
    return sorted({record["model"] for record in records if record["state"] == "ready"})


async def frames(
    inbox: asyncio.Queue[Msg], request_id: str, timeout_s: float
) -> AsyncIterator[dict[str, Any]]:
    """The frames of one reply in order: head, data, ..., end or error."""
    give_up = asyncio.get_running_loop().time() + timeout_s
    attempt = expected = 0
    while True:
        async with asyncio.timeout_at(give_up):
            message = await inbox.get()
        frame = msgpack.unpackb(message.data)
        if frame["v"] != 1 or frame["request_id"] != request_id or frame["attempt"] < attempt:
            continue  # of another version or request, or from a worker that was given up
        if frame["attempt"] > attempt:
            if expected > 1:  # more than the head was printed already
                raise SystemExit("the worker was lost on the way; send the request again")
            attempt, expected = frame["attempt"], 0
        if frame["seq"] < expected:
            continue
        if frame["seq"] > expected:
            raise SystemExit(f"frame {expected} of the answer was lost; send the request again")
        expected += 1
        yield frame
        if frame["t"] in ("end", "error"):
            return


def event_texts(lines: list[bytes]) -> str:
    """The text in some lines of the answer's event stream."""
    events = [line[6:] for line in lines if line.startswith(b"data: ") and line[6:] != b"[DONE]"]
    choices = [choice for event in events for choice in json.loads(event).get("choices", [])]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def ask(
    client: Client, model: str, text: str, pictures: list[bytes], timeout_s: float
) -> int:
    """Publish the job and print its answer; the exit status."""
    inbox = client.new_inbox()
    arrived: asyncio.Queue[Msg] = asyncio.Queue()
    # Before the job, or its first frames are missed.
    subscription = await client.subscribe(inbox, cb=arrived.put)
    job = generate_job(model=model, text=text, pictures=pictures, inbox=inbox, timeout_s=timeout_s)
    request_id = str(job["request_id"])
    done = False
    try:
        await client.jetstream().publish(
            f"epd.v1.generate.{model_token(model)}.{lane(len(pictures))}.any",
            msgpack.packb(job),
            headers={"Nats-Msg-Id": f"generate-{request_id}"},
        )
        status, rest = 0, b""
        async for frame in frames(arrived, request_id, timeout_s + 2):
            if frame["t"] == "head":
                status = frame["status"]
            elif frame["t"] == "data" and status == 200:
                *lines, rest = (rest + frame["data"]).split(b"\n")
                print(event_texts(lines), end="", flush=True)
            elif frame["t"] == "data":
                rest += frame["data"]
            elif frame["t"] == "error":
                done = True
                print(f"{frame['status']} {frame['code']}: {frame['message']}", file=sys.stderr)
                return 1
        done = True
    finally:
        if not done:  # Ctrl-C, or a time-out: nobody should go on working for us
            cancel = {"t": "cancel", "v": 1, "request_id": request_id}
            await client.publish(f"epd.v1.cancel.{request_id}", msgpack.packb(cancel))
        await subscription.unsubscribe()
    print()
    if status != 200:  # the engine refused; its answer is OpenAI's error as JSON
        print(f"{status}: {rest.decode()}", file=sys.stderr)
        return 1
    return 0


def local_nats() -> str:
    """The address in the state file of an `epd up` in this folder, or NATS's usual one."""
    state = Path(".epd/state.json")
    if state.exists():
        return str(json.loads(state.read_text())["nats_url"])
    return "nats://127.0.0.1:4222"


async def no_noise(error: Exception) -> None:
    """nats-py prints a traceback for each failed attempt; the one error at the end says enough."""


async def main() -> int:
    parser = argparse.ArgumentParser(description="Ask about pictures over NATS.")
    parser.add_argument("text")
    parser.add_argument("pictures", nargs="*", type=Path)
    parser.add_argument(
        "--nats",
        default=local_nats(),
        help="credentials inside; default: what `epd up` started here",
    )
    parser.add_argument(
        "--inbox-prefix", default="_INBOX", help="where the NATS user may be answered"
    )
    parser.add_argument("--model", help="default: the one that is served")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds")
    options = parser.parse_args()
    pictures = [path.read_bytes() for path in options.pictures]
    if sum(map(len, pictures)) > MAX_INLINE_BYTES:
        print(f"inline pictures take {MAX_INLINE_BYTES} bytes together, at most", file=sys.stderr)
        return 1
    try:
        client = await nats.connect(
            options.nats,
            allow_reconnect=False,
            connect_timeout=5,
            error_cb=no_noise,
            inbox_prefix=options.inbox_prefix,
        )
    except (OSError, nats.errors.Error) as error:
        print(f"cannot connect to NATS ({error}); is the URL right?", file=sys.stderr)
        return 1
    try:
        model = options.model
        if model is None:
            models = await ready_models(client)
            if len(models) != 1:
                print(f"name a model with --model; served: {models}", file=sys.stderr)
                return 1
            model = models[0]
        return await ask(client, model, options.text, pictures, options.timeout)
    except TimeoutError:
        print(f"no answer within {options.timeout} s", file=sys.stderr)
        return 1
    finally:
        await client.drain()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
