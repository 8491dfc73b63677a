"""The makers of videos and sounds: what they make can be read, and depends on its arguments alone."""

from __future__ import annotations

import base64
import io
import itertools
import wave
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from models import clips


def read_frames(data: bytes, folder: Path) -> tuple[list[np.ndarray], float]:
    path = folder / "clip.mp4"
    path.write_bytes(data)
    video = cv2.VideoCapture(str(path))
    frames = []
    while True:
        read, frame = video.read()
        if not read:
            return frames, video.get(cv2.CAP_PROP_FPS)
        frames.append(frame.astype(int))


def read_sound(data: bytes) -> tuple[np.ndarray, int]:
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2"), file.getframerate()


def test_a_video_has_the_frames_size_and_rate_that_were_asked_for(tmp_path: Path) -> None:
    frames, fps = read_frames(clips.video_bytes(1, 6, width=96, height=64, fps=2.0), tmp_path)
    assert [frame.shape for frame in frames] == [(64, 96, 3)] * 6
    assert fps == 2.0


@pytest.mark.parametrize("seed", range(5))
def test_something_moves_in_every_frame(tmp_path: Path, seed: int) -> None:
    frames, _ = read_frames(clips.video_bytes(seed), tmp_path)
    changes = [np.abs(b - a).mean() for a, b in itertools.pairwise(frames)]
    assert min(changes) > 0.5, changes  # of 255


def test_a_size_that_cannot_be_written_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="cannot write"):
        clips.video_bytes(1, width=0, height=0)


@pytest.mark.parametrize("rate", [8_000, 44_100])
def test_a_sound_has_the_length_and_rate_that_were_asked_for(rate: int) -> None:
    samples, read_rate = read_sound(clips.audio_bytes(1, seconds=1.5, rate=rate))
    assert read_rate == rate
    assert len(samples) == 1.5 * rate
    assert 0.4 < np.abs(samples).max() / 32768 < 0.6


def test_an_empty_sound_is_a_sound() -> None:
    samples, _ = read_sound(clips.audio_bytes(1, seconds=0))
    assert len(samples) == 0


@pytest.mark.parametrize("make", [clips.video_bytes, clips.audio_bytes])
def test_bytes_depend_on_the_seed_alone(make: Callable[[int], bytes]) -> None:
    assert make(1) == make(1)
    assert make(1) != make(2)


def test_uris_hold_the_bytes() -> None:
    for uri, media_type in (
        (clips.video_uri(b"ab"), "video/mp4"),
        (clips.audio_uri(b"ab"), "audio/wav"),
    ):
        head, _, data = uri.partition(",")
        assert head == f"data:{media_type};base64"
        assert base64.b64decode(data) == b"ab"
