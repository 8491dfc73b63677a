"""The demo's pictures and questions, made by the program that the small model was trained with."""

from __future__ import annotations

import importlib.util
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from epd_common.errors import EpdError

SEED = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request of the demo; ``expected`` is None where any text will do."""

    title: str
    way: str
    question: str
    expected: str | None
    messages: list[dict[str, Any]]
    expected_origins: list[str]


class Album:
    """Pictures with known answers.

    Args:
        model: The checkpoint's folder; the drawing program lies beside it.
    """

    def __init__(self, model: str) -> None:
        self._shapes = _load(Path(model).resolve().parent / "shapes.py")
        self._rng = random.Random(SEED)
        self._scenes: list[Any] = []
        self._uris: list[str] = []

    def cases(self) -> list[Case]:
        """The demo's requests, in order: later ones come back to pictures of earlier ones."""
        self._draw(18)
        return [
            self._case("1 image", "REST", [0], ["encoded"]),
            self._case("4 images", "REST", [1, 2, 3, 4], ["encoded"] * 4),
            self._case("6 images", "REST", [5, 6, 7, 8, 9, 10], ["encoded"] * 6, kind="list"),
            self._case("no image", "REST", [], []),
            self._case("2 images, streamed", "REST, streamed", [11, 12], ["encoded"] * 2),
            self._case("an image seen before", "REST", [2], ["reused"], kind="describe"),
            self._case("one image twice, one new", "REST", [13, 13, 14], ["encoded"] * 2),
            self._case("straight over NATS", "NATS", [15, 4, 16], ["encoded", "reused", "encoded"]),
        ]

    def _draw(self, count: int) -> None:
        """Draw scenes that all differ, so that no two pictures have the same bytes."""
        while len(self._scenes) < count:
            scene = self._shapes.random_scene(self._rng)
            if scene not in self._scenes:
                height, width = self._shapes.random_size(self._rng)
                picture = self._shapes.draw(scene, height, width, self._rng)
                self._scenes.append(scene)
                self._uris.append(self._shapes.data_uri(picture))

    def _case(
        self, title: str, way: str, numbers: list[int], origins: list[str], kind: str | None = None
    ) -> Case:
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": self._uris[n]}} for n in numbers
        ]
        question, expected = "How many images are there?", None
        if numbers:
            asked = self._shapes.ask(self._rng, [self._scenes[n] for n in numbers], kind)
            question, expected = asked.text, asked.answer
        parts.append({"type": "text", "text": question})
        return Case(
            title=title,
            way=way,
            question=question,
            expected=expected,
            messages=[{"role": "user", "content": parts}],
            expected_origins=origins,
        )


def _load(path: Path) -> ModuleType:
    if not path.exists():
        raise EpdError(
            f"the demo draws its pictures with {path}, which is not there: run it with the small "
            "model of the repository (models/shapes-qwen2vl)"
        )
    spec = importlib.util.spec_from_file_location("epd_demo_shapes", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
