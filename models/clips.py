"""Videos and sounds made from a seed: a shape that moves across the picture, a row of tones.

Needs only numpy and OpenCV (for videos), so that a test can make media without loading torch. The
bytes are the same for the same arguments, as long as the same OpenCV writes them.
"""

from __future__ import annotations

import base64
import io
import random
import tempfile
import wave
from pathlib import Path

import numpy as np

from models.shapes import BACKGROUNDS, COLOURS

_FADE_S = 0.01
_AMPLITUDE = 0.5
_TONES_PER_S = 4


def video_bytes(
    seed: int, frames: int = 8, width: int = 112, height: int = 112, fps: float = 4.0
) -> bytes:
    """Draw a disc that moves from left to right on a plain background: MPEG-4 in an MP4 container.

    Args:
        seed: colours, and where the disc starts and moves to.
        frames: at least 1.
        width, height: in px, both even.
        fps: frames a second.

    Raises:
        RuntimeError: OpenCV cannot write such a video.
    """
    import cv2  # needed by this function alone, and only vLLM's environment has it

    rng = random.Random(seed)
    background = rng.choice(list(BACKGROUNDS.values()))
    colour = rng.choice(list(COLOURS.values()))
    start = np.array([rng.uniform(0.0, 0.3), rng.random()]) * (width, height)
    end = np.array([rng.uniform(0.7, 1.0), rng.random()]) * (width, height)
    radius = min(width, height) // 4
    rows, columns = np.ogrid[:height, :width]
    # The writer takes a path only.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        codec = cv2.VideoWriter.fourcc(*"mp4v")
        writer = cv2.VideoWriter(str(path), codec, fps, (width, height))
        if not writer.isOpened():
            raise RuntimeError(f"OpenCV cannot write MPEG-4 of {width}x{height} at {fps} fps")
        for place in np.linspace(0, 1, frames):
            x, y = start + (end - start) * place
            picture = np.full((height, width, 3), background, np.uint8)
            picture[(columns - x) ** 2 + (rows - y) ** 2 < radius**2] = colour
            writer.write(picture[:, :, ::-1])  # OpenCV orders a pixel blue, green, red
        writer.release()
        return path.read_bytes()


def audio_bytes(seed: int, seconds: float = 2.0, rate: int = 16_000) -> bytes:
    """Play a row of tones of a quarter of a second each: 16-bit mono PCM in a WAV container.

    Args:
        seed: the tones' pitches, from 200 to 2,000 Hz.
        seconds: length of the whole.
        rate: samples a second.
    """
    rng = random.Random(seed)
    count = round(seconds * rate)
    at_s = np.arange(count) / rate
    tone = (at_s * _TONES_PER_S).astype(int)
    pitches_hz = np.array([rng.uniform(200, 2000) for _ in range(tone.max(initial=0) + 1)])
    since_s = at_s - tone / _TONES_PER_S
    until_s = 1 / _TONES_PER_S - since_s
    # Faded in and out: a hard edge would be a click, much the same in every sound.
    loudness = np.minimum(1, np.minimum(since_s, until_s) / _FADE_S)
    sound = _AMPLITUDE * loudness * np.sin(2 * np.pi * pitches_hz[tone] * since_s)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((sound * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def video_uri(data: bytes) -> str:
    """Return an MP4's data URI, for a ``video_url`` content part."""
    return _data_uri("video/mp4", data)


def audio_uri(data: bytes) -> str:
    """Return a WAV's data URI, for an ``audio_url`` content part."""
    return _data_uri("audio/wav", data)


def _data_uri(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64," + base64.b64encode(data).decode("ascii")
