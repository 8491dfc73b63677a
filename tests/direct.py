"""Jobs that a client publishes itself, the inbox that their answers come to, and a worker of its own."""

from __future__ import annotations

import json
import secrets
from typing import Any

from nats.aio.msg import Msg

from epd_common.bus import Bus
from epd_common.protocol import GenerateJob, ReplyEnd, ReplyError, decode_reply, subjects
from service_stack import BOUND_S, ServiceStack, eventually


class Inbox:
    """What comes to a subject."""

    def __init__(self) -> None:
        self.frames: list[Any] = []
        self.subject = f"_INBOX.test.{secrets.token_hex(8)}"

    async def listen(self, bus: Bus) -> Inbox:
        async def note(message: Msg) -> None:
            self.frames.append(decode_reply(message.data))

        await bus.subscribe(self.subject, note)
        await bus.flush()
        return self

    async def end(self) -> ReplyEnd:
        """The last frame of a reply that is whole."""
        await eventually(
            lambda: bool(self.frames) and isinstance(self.frames[-1], ReplyEnd), "the reply ends"
        )
        last: ReplyEnd = self.frames[-1]
        return last

    async def error(self) -> ReplyError:
        """The error that ends the reply."""
        await eventually(lambda: bool(self.frames), "an error frame comes")
        (frame,) = self.frames
        assert isinstance(frame, ReplyError)
        return frame


async def publish(stack: ServiceStack, stage: str, data: bytes) -> None:
    names = {"encode": subjects.encode_subject, "generate": subjects.generate_subject}
    await stack.bus.js.publish(names[stage](stack.model, "l0"), data)


async def take(bus: Bus, stream: str, consumer: str, *, within_s: float = BOUND_S) -> Msg:
    """The next job of a lane's consumer, as a worker in any language gets it."""
    inbox = bus.client.new_inbox()
    subscription = await bus.client.subscribe(inbox)
    wanted = {"batch": 1, "expires": int(within_s * 1e9), "group": "load", "priority": 0}
    subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
    await bus.client.publish(subject, json.dumps(wanted).encode(), reply=inbox)
    message = await subscription.next_msg(timeout=within_s)
    assert not message.headers or "Status" not in message.headers, message.headers
    await subscription.unsubscribe()
    return message


def direct_job(stack: ServiceStack, inbox: Inbox | str, **fields: Any) -> GenerateJob:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    job = {
        "request_id": secrets.token_hex(8),
        "model": stack.model,
        "inbox": inbox if isinstance(inbox, str) else inbox.subject,
        "body": json.dumps(body).encode(),
    }
    return GenerateJob(**(job | fields))
