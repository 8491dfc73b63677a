"""Requests whose answers are compared: every way in which pictures and text can be mixed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from models import shapes

Part = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and its right answer where the trained model should know one."""

    title: str
    messages: list[dict[str, Any]]
    expected: str | None = None
    stream: bool = False


class CaseMaker:
    """Draws pictures and writes requests; the same seed gives the same requests."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._shared = [self._picture() for _ in range(6)]

    def all(self) -> Iterator[Case]:
        """At least 40 requests."""
        for count in range(1, 7):
            for turn in range(3):
                yield self._question(
                    f"{count} images, {turn}", [self._picture() for _ in range(count)]
                )
        for count in range(1, 7):
            yield self._question(f"{count} shared images", self._shared[:count], stream=True)
        for turn in range(3):
            picture = self._picture()
            yield self._question(f"an image {turn + 2} times", [picture] * (turn + 2))
            yield self._question(
                f"repeated and shared {turn}", [picture, self._shared[turn], picture]
            )
        for turn in range(4):
            yield self._between(turn)
        for turn in range(4):
            yield self._turns(turn)
        for turn, words in enumerate(
            ("How many images are there?", "Describe image #1.", "Hello.", "List the images.")
        ):
            yield Case(f"text only {turn}", [user(text(words))], stream=turn % 2 == 1)

    def _picture(self) -> tuple[shapes.Scene, Part]:
        return picture(self._rng)

    def _question(
        self, title: str, pictures: list[tuple[shapes.Scene, Part]], *, stream: bool = False
    ) -> Case:
        asked = shapes.ask(self._rng, [scene for scene, _ in pictures])
        parts = [part for _, part in pictures]
        return Case(title, [user(*parts, text(asked.text))], asked.answer, stream)

    def _between(self, turn: int) -> Case:
        """Text before, between and after pictures; images before, between and after text."""
        one, two, three = (self._picture()[1] for _ in range(3))
        orders = (
            [
                text("Look at this."),
                one,
                text("And at this."),
                two,
                text("What is in image #2?"),
            ],
            [one, text("What is in image #1?"), two],
            [text("Describe image #1."), one],
            [one, two, text("Compare."), three, text("How many images are there?")],
        )
        return Case(f"text between {turn}", [user(*orders[turn])], stream=turn % 2 == 0)

    def _turns(self, turn: int) -> Case:
        """A conversation: pictures of earlier turns come again."""
        (scene, one), (other, two) = self._picture(), self._shared[turn]
        first = shapes.ask(self._rng, [scene], "what")
        asked = shapes.ask(self._rng, [scene, other])
        return Case(
            f"conversation {turn}",
            [
                {"role": "system", "content": "You are a helpful assistant."},
                user(one, text(first.text)),
                {"role": "assistant", "content": first.answer},
                user(two, text(asked.text)),
            ],
            asked.answer,
        )


def picture(rng: random.Random) -> tuple[shapes.Scene, Part]:
    """A picture that was not there before, and what it shows."""
    scene = shapes.random_scene(rng)
    height, width = shapes.random_size(rng)
    uri = shapes.data_uri(shapes.draw(scene, height, width, rng))
    return scene, {"type": "image_url", "image_url": {"url": uri}}


def text(words: str) -> Part:
    return {"type": "text", "text": words}


def user(*parts: Part) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}
