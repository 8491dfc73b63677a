"""Requests with videos and sound, and a few with pictures, for models that only continue them."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator

from cases import Case, Part, picture, text, user

from models.clips import audio_bytes, audio_uri, video_bytes, video_uri


def video(seed: int, *, frames: int = 16, fps: float = 4.0, width: int = 112) -> Part:
    data = video_bytes(seed, frames=frames, width=width, height=84, fps=fps)
    return {"type": "video_url", "video_url": {"url": video_uri(data)}}


def sound(seed: int, seconds: float = 1.0, rate: int = 16_000) -> Part:
    return sound_of(audio_bytes(seed, seconds, rate))


def sound_of(data: bytes) -> Part:
    return {"type": "audio_url", "audio_url": {"url": audio_uri(data)}}


def at_rate(wav: bytes, rate: int) -> bytes:
    """The same samples, said to be of another rate in Hz."""
    return wav[:24] + rate.to_bytes(4, "little") + wav[28:]


def not_finite() -> bytes:
    """A WAV of 32-bit floats that are no numbers."""
    samples = struct.pack("<f", math.nan) * 16_000
    form = struct.pack("<HHIIHH", 3, 1, 16_000, 64_000, 4, 32)
    chunks = b"WAVEfmt " + struct.pack("<I", len(form)) + form
    chunks += b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


def input_audio(seed: int) -> Part:
    data = audio_uri(audio_bytes(seed)).partition(",")[2]
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def videos(rng: random.Random) -> Iterator[Case]:
    one = video(1)
    yield _case([one, text("What happens?")])
    yield _case([text("First this."), one, text("Then this."), video(2), text("Compare.")])
    yield _case([one, one, text("Twice the same?")])
    # Of one size and of another pace: the positions that the model computes with are others.
    yield _case([video(3, fps=1.0), text("A slow one.")])
    yield _case([video(4, frames=6, fps=0.5, width=168), text("Slower, and wider.")])
    yield _case([picture(rng)[1], one, picture(rng)[1], text("A video between pictures.")])


def sounds(rng: random.Random) -> Iterator[Case]:
    one = sound(1)
    yield _case([one, text("What do you hear?")])
    yield _case([text("First this."), one, text("Then this."), sound(2, 2.5), text("Compare.")])
    yield _case([one, one, text("Twice the same?")])
    yield _case([input_audio(3), text("As bytes.")])
    yield _case([sound(4, 1.5, 44_100), text("At another rate.")])


def pictures(rng: random.Random) -> Iterator[Case]:
    one = picture(rng)[1]
    yield _case([one, text("What is it?")])
    yield _case([text("First this."), one, text("Then this."), picture(rng)[1], text("Compare.")])
    yield _case([one, one, text("Twice the same?")])


def text_alone() -> Case:
    return _case([text("Hello.")])


def _case(parts: list[Part]) -> Case:
    words = " / ".join(part["text"] if part["type"] == "text" else part["type"] for part in parts)
    return Case(words, [user(*parts)], stream=len(parts) % 2 == 0)
