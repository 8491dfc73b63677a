"""The program that decodes: ``python -m epd_common.decoding.child MEMORY_BYTES``.

It reads files from the socket that is its standard input and answers each with what it found. Before the
first one it gives up what it does not need: more memory than it was given, files, further processes, a
core dump. Where the machine has no memory left, the kernel takes this process first.

A file that is decoded for longer than it may be ends the process, by an alarm that nothing in it can
catch; so it is bounded even where its parent is gone. What it may take of a processor goes by its bytes and
pixels, so that a small file cannot take what a large one may, however busy the machine is.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Callable
from typing import Any

from epd_common.decoding.pictures import CorruptError, TooManyPixelsError, decode
from epd_common.decoding.structure import TooComplexError

HEAD = struct.Struct(">QQd")
"""Of a question: bytes of the file that follows, pixels it may have, seconds it may take."""

ANSWER = struct.Struct(">I")
"""Of an answer: bytes of the JSON that follows."""

READY = b"R"
"""Said once, when the limits stand."""

OPEN_FILES = 16

BASE_S = 3.0
MEGAPIXEL_S = 0.05
MEBIBYTE_S = 0.1
"""Seconds of a processor for any picture, each of its megapixels and each MiB of its file: several times what
the slowest formats take (0.03 s a megapixel for WebP and progressive JPEG)."""


def main() -> None:
    limit_itself(int(sys.argv[1]))
    with socket.socket(fileno=sys.stdin.fileno()) as parent:
        parent.sendall(READY)
        while True:
            question = _read(parent, HEAD.size)
            if question is None:
                return
            size, max_pixels, timeout_s = HEAD.unpack(question)
            data = _read(parent, size)
            if data is None:
                return

            def bound(pixels: int, size: int = size) -> None:
                signal.setitimer(signal.ITIMER_PROF, allowed_s(size, pixels))

            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            bound(0)  # its header alone may take long
            answer = json.dumps(judge(bytes(data), max_pixels, bound)).encode()
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            del data
            parent.sendall(ANSWER.pack(len(answer)) + answer)


def allowed_s(size: int, pixels: int) -> float:
    """Seconds of a processor that a file of so many bytes and pixels may take."""
    return BASE_S + MEBIBYTE_S * size / (1 << 20) + MEGAPIXEL_S * pixels / 1e6


def judge(data: bytes, max_pixels: int, on_pixels: Callable[[int], None]) -> dict[str, Any]:
    """What a file is, or its ``fault``: ``pixels``, ``complex``, ``corrupt`` or ``memory``, with a ``text``.

    Args:
        on_pixels: Told of how many there are before they are decoded.
    """
    try:
        found = decode(data, max_pixels, on_pixels)
    except TooComplexError as error:
        return {"fault": "complex", "text": str(error)}
    except TooManyPixelsError as error:
        return {"fault": "pixels", "text": str(error)}
    except CorruptError as error:
        return {"fault": "corrupt", "text": str(error)}
    except MemoryError:
        return {"fault": "memory", "text": ""}
    return {"content_type": found.content_type, "width": found.width, "height": found.height}


def limit_itself(memory_bytes: int) -> None:
    """Bound what this process may do from here on; ``memory_bytes`` come on top of what it has."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business, which ends us
    for alarm in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(alarm, signal.SIG_DFL)
    warnings.simplefilter("ignore")
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
    ):
        with contextlib.suppress(ValueError, OSError):  # a stricter limit stands already
            resource.setrlimit(what, (most, most))
    if sys.platform != "linux":
        return  # others do not keep a limit of address space; time stays bounded
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _read(source: socket.socket, size: int) -> bytearray | None:
    """So many bytes; None if the other side is gone."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        try:
            count = source.recv_into(view)
        except OSError:
            return None
        if not count:
            return None
        view = view[count:]
    return data


if __name__ == "__main__":
    main()
