"""Pictures with known answers: one object on a plain background, and questions about a row of them.

Needs only numpy and Pillow, so that a demo or a test can make pictures without loading torch.
Everything random comes from the ``random.Random`` that the caller passes in.
"""

from __future__ import annotations

import base64
import functools
import io
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

RGB = tuple[int, int, int]

COLOURS: dict[str, RGB] = {
    "red": (215, 35, 35),
    "green": (35, 165, 55),
    "blue": (40, 70, 220),
    "yellow": (238, 215, 40),
    "purple": (135, 40, 165),
    "orange": (245, 135, 20),
    "cyan": (40, 205, 215),
}
BACKGROUNDS: dict[str, RGB] = {
    "white": (245, 245, 245),
    "black": (15, 15, 15),
    "gray": (128, 128, 128),
}
SHAPES: tuple[str, ...] = (
    "circle", "square", "triangle", "star", "cross", "ring", *(f"digit {n}" for n in range(10)),
)  # fmt: skip

CELL_PX = 28
"""One drawn cell: 2x2 patches of 14 px, which the vision tower merges into one token."""
MIN_SIDE_PX, MAX_SIDE_PX = 56, 224
SIDES_PX: tuple[int, ...] = tuple(range(MIN_SIDE_PX, MAX_SIDE_PX + 1, CELL_PX))
"""The picture sides that the checkpoint was trained on; others give unreliable answers."""
MAX_IMAGES = 6
"""The most pictures in one conversation that the checkpoint was trained on."""

_OVERSAMPLING = 4
_TINT = 9.0


@dataclass(frozen=True, slots=True)
class Scene:
    """What one picture shows."""

    shape: str
    colour: str
    background: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question over a row of pictures, and the one answer that counts as right."""

    kind: str
    text: str
    answer: str


def random_scene(rng: random.Random) -> Scene:
    """Draw one of the 336 scenes, all equally likely."""
    return Scene(rng.choice(SHAPES), rng.choice(list(COLOURS)), rng.choice(list(BACKGROUNDS)))


def random_size(rng: random.Random) -> tuple[int, int]:
    """Return a (height, width) in px that the checkpoint knows, each side drawn by itself."""
    return rng.choice(SIDES_PX), rng.choice(SIDES_PX)


def draw(scene: Scene, height: int, width: int, rng: random.Random) -> Image.Image:
    """Draw a scene as an RGB picture of ``height`` x ``width`` px, slightly tinted by ``rng``.

    The object is repeated in every 28 px cell instead of floating in the picture: each vision
    token then carries the whole answer at any resolution, which a model this small can learn,
    and an embedding that was swapped or taken from another picture gives a wrong answer.

    Raises:
        ValueError: a side is not a positive multiple of 28 px.
    """
    if min(height, width) < CELL_PX or height % CELL_PX or width % CELL_PX:
        raise ValueError(f"sides must be multiples of {CELL_PX} px, got {height}x{width}")
    tiled = np.tile(_cell(scene), (height // CELL_PX, width // CELL_PX, 1))
    tint = np.array([rng.uniform(-_TINT, _TINT) for _ in range(3)], np.float32)
    return Image.fromarray(np.clip(np.rint(tiled + tint), 0, 255).astype(np.uint8))


def data_uri(image: Image.Image) -> str:
    """Encode a picture as the PNG data URI of an ``image_url`` content part."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def ask(rng: random.Random, scenes: Sequence[Scene], kind: str | None = None) -> Question:
    """Make a question about ``scenes``, which are called image #1, #2, ... in their order.

    Args:
        rng: chooses the kind, unless it is given, and the picture that is asked about.
        scenes: at least one scene, in the order in which the conversation shows them.
        kind: one of ``QUESTION_KINDS``.
    """
    if kind is None:
        kind = rng.choices(list(_MAKERS), [weight for weight, _ in _MAKERS.values()])[0]
    _, make = _MAKERS[kind]
    text, answer = make(rng.randrange(len(scenes)), scenes)
    return Question(kind, text, answer)


def _what(index: int, scenes: Sequence[Scene]) -> tuple[str, str]:
    scene = scenes[index]
    return f"What is in image #{index + 1}?", f"a {scene.colour} {scene.shape}"


def _colour(index: int, scenes: Sequence[Scene]) -> tuple[str, str]:
    return f"What colour is the object in image #{index + 1}?", scenes[index].colour


def _shape(index: int, scenes: Sequence[Scene]) -> tuple[str, str]:
    return f"What object is in image #{index + 1}?", scenes[index].shape


def _background(index: int, scenes: Sequence[Scene]) -> tuple[str, str]:
    return f"What is the background colour of image #{index + 1}?", scenes[index].background


def _describe(index: int, scenes: Sequence[Scene]) -> tuple[str, str]:
    scene = scenes[index]
    shown = f"a {scene.colour} {scene.shape} on a {scene.background} background"
    return f"Describe image #{index + 1}.", f"Image #{index + 1} shows {shown}."


def _count(index: int, scenes: Sequence[Scene]) -> tuple[str, str]:
    return "How many images are there?", str(len(scenes))


def _list(index: int, scenes: Sequence[Scene]) -> tuple[str, str]:
    items = (f"#{n} {scene.colour} {scene.shape}." for n, scene in enumerate(scenes, 1))
    return "List the images.", " ".join(items)


_MAKERS: dict[str, tuple[float, Callable[[int, Sequence[Scene]], tuple[str, str]]]] = {
    "what": (0.30, _what),
    "colour": (0.15, _colour),
    "shape": (0.15, _shape),
    "background": (0.10, _background),
    "describe": (0.10, _describe),
    "count": (0.08, _count),
    "list": (0.12, _list),
}
QUESTION_KINDS: tuple[str, ...] = tuple(_MAKERS)


@functools.cache
def _cell(scene: Scene) -> np.ndarray:
    """Draw the object centred in one cell: float32 of (28, 28, 3), 0..255."""
    side = CELL_PX * _OVERSAMPLING
    image = Image.new("RGB", (side, side), BACKGROUNDS[scene.background])
    _draw_object(ImageDraw.Draw(image), scene.shape, COLOURS[scene.colour], side)
    small = image.resize((CELL_PX, CELL_PX), Image.Resampling.LANCZOS)
    return np.asarray(small, np.float32)


def _draw_object(pen: ImageDraw.ImageDraw, shape: str, fill: RGB, side: int) -> None:
    mid, radius = side / 2, side * 0.44
    low, high = mid - radius, mid + radius
    match shape:
        case "circle":
            pen.ellipse((low, low, high, high), fill=fill)
        case "ring":
            pen.ellipse((low, low, high, high), outline=fill, width=int(radius * 0.36))
        case "square":
            half = radius * 0.9
            pen.rectangle((mid - half, mid - half, mid + half, mid + half), fill=fill)
        case "triangle":
            base = mid + radius * 0.85
            pen.polygon([(mid, low), (low, base), (high, base)], fill=fill)
        case "star":
            tips = [
                (mid + reach * math.sin(turn), mid - reach * math.cos(turn))
                for reach, turn in (
                    (radius * (0.42 if point % 2 else 1.0), point * math.pi / 5)
                    for point in range(10)
                )
            ]
            pen.polygon(tips, fill=fill)
        case "cross":
            half = radius * 0.3
            pen.rectangle((mid - half, low, mid + half, high), fill=fill)
            pen.rectangle((low, mid - half, high, mid + half), fill=fill)
        case _:
            font = ImageFont.load_default(size=int(side * 0.95))
            pen.text(
                (mid, mid), shape.removeprefix("digit "), fill=fill, font=font, anchor="mm",
                stroke_width=3, stroke_fill=fill,
            )  # fmt: skip
