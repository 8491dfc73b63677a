"""What must not be there: listening sockets, and pixels or tensors on the bus."""

from __future__ import annotations

import asyncio
import io
import random

import psutil
import pytest
from answers import ask
from deployment import Deployment
from nats.aio.msg import Msg

from epd_common.bus import Bus
from epd_common.ingest.data_uri import make_data_uri
from epd_common.protocol.jobs import MAX_INLINE_BYTES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


async def test_only_the_gateway_and_the_brokers_listen(small: Deployment) -> None:
    listening = {}
    for service in small.stack.services:
        root = psutil.Process(service.pid)
        for process in (root, *root.children(recursive=True)):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    listening[connection.laddr.port] = service.role
    assert listening == {int(small.url.rpartition(":")[2]): "gateway"}


def noise(width: int, height: int) -> bytes:
    """A PNG that does not compress: about 3 bytes a pixel."""
    from PIL import Image

    image = Image.frombytes("RGB", (width, height), random.Random(1).randbytes(3 * width * height))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


async def test_fc18_no_pixels_and_no_tensors_on_the_bus(small: Deployment) -> None:
    picture = noise(700, 500)
    assert len(picture) > 2 * MAX_INLINE_BYTES
    probe = picture[5000:5064]
    sizes: list[tuple[int, str]] = []
    leaks: list[str] = []

    async def look(message: Msg) -> None:
        sizes.append((len(message.data), message.subject))
        if probe in message.data:
            leaks.append(message.subject)

    async with Bus(small.stack.nats_url, name="sniffer") as bus:
        await bus.client.subscribe(">", cb=look)
        await bus.flush()
        content = [
            {"type": "image_url", "image_url": {"url": make_data_uri(picture)}},
            {"type": "text", "text": "Describe image #1."},
        ]
        await ask(small.url, small.name, [{"role": "user", "content": content}], stream=True)
        await bus.flush()
        await asyncio.sleep(0)
    subjects = {subject.split(".")[2] for _, subject in sizes if subject.startswith("epd.v1.")}
    assert {"encode", "generate", "ready"} <= subjects  # the sniffer did see the request
    assert not leaks
    assert max(sizes)[0] <= MAX_INLINE_BYTES
