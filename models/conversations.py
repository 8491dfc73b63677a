"""Training conversations as token batches, laid out exactly as the chat template renders them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import transformers

from models import checkpoint, shapes
from models.network import IGNORED, scene_targets

LABELS = tuple(f"#{number}" for number in range(1, 10))
SYSTEM = "You are a helpful assistant."
PREAMBLES = (
    "Look at this.",
    "Hello there. ",
    "Here are some pictures.",
    "Please look at these images. ",
    "Next one:",
    "I have a question about these images.\n",
)
_NO_SCENE = (IGNORED,) * 3
_TURNS = (4, 8)


@dataclass(frozen=True, slots=True)
class Picture:
    """A scene as the language part sees it: (rows * columns, HIDDEN) features of a picture."""

    scene: shapes.Scene
    rows: int
    columns: int
    features: torch.Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded conversations; the first dimension of each tensor but ``positions`` is the batch."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    positions: torch.Tensor  # (3, batch, length): time, row, column
    targets: torch.Tensor  # IGNORED outside the answers
    scene_targets: torch.Tensor  # (batch, length, 3), IGNORED everywhere but at labels
    features: torch.Tensor  # of all pictures in order


@dataclass(slots=True)
class _Sequence:
    """One conversation under construction."""

    ids: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    scene_targets: list[tuple[int, ...]] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    messages: list[dict[str, object]] = field(default_factory=list)
    next_position: int = 0


def corpus(rng: random.Random, size: int = 4000) -> Iterator[str]:
    """Yield the texts that the tokenizer is trained on."""
    for _ in range(size):
        scenes = [shapes.random_scene(rng) for _ in range(rng.randint(1, shapes.MAX_IMAGES))]
        question = shapes.ask(rng, scenes)
        yield from (question.text, question.answer, "user\n", "assistant\n", f"system\n{SYSTEM}")
        yield rng.choice(PREAMBLES)


class Writer:
    """Writes random conversations over a pool of pictures."""

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerFast,
        pool: Sequence[Picture],
        rng: random.Random,
    ) -> None:
        self._tokenizer = tokenizer
        self._pool = pool
        self._rng = rng
        self._encoded: dict[str, list[int]] = {}
        self._ids = checkpoint.special_ids(tokenizer)
        self._label_ids = {tokenizer.convert_tokens_to_ids(label): label for label in LABELS}

    def batch(self, max_images: int, token_budget: int) -> Batch:
        """Write conversations of up to ``max_images`` pictures until the tokens are used up."""
        sequences: list[_Sequence] = []
        longest = 0
        while True:
            sequence = self._conversation(max_images)
            longest = max(longest, len(sequence.ids))
            if sequences and longest * (len(sequences) + 1) > token_budget:
                return self._pad(sequences)
            sequences.append(sequence)

    def check_layout(self, samples: int = 20) -> None:
        """Compare the layout with the chat template's.

        Raises:
            ValueError: they differ, so a trained model would not understand its server.
        """
        pad = self._ids[checkpoint.IMAGE_PAD]
        for _ in range(samples):
            sequence = self._conversation(shapes.MAX_IMAGES)
            rendered = self._tokenizer.apply_chat_template(sequence.messages, tokenize=False)
            expected = self._encode(str(rendered))
            collapsed = [
                token
                for place, token in enumerate(sequence.ids)
                if not (token == pad and place and sequence.ids[place - 1] == pad)
            ]
            if collapsed != expected:
                raise ValueError(f"layout differs from the chat template's:\n{rendered}")

    def _conversation(self, max_images: int) -> _Sequence:
        rng, sequence = self._rng, _Sequence()
        if rng.random() < 0.3:
            self._text(sequence, f"{checkpoint.TURN_START}system\n{SYSTEM}{checkpoint.TURN_END}\n")
            sequence.messages.append({"role": "system", "content": SYSTEM})
        first = max_images if rng.random() < 0.5 else rng.randint(1, max_images)
        image_counts = [first] + [0] * (rng.randint(*_TURNS) - 1)
        if first < max_images and rng.random() < 0.5:
            image_counts[rng.randrange(1, len(image_counts))] = 1
        for image_count in image_counts:
            self._turn(sequence, image_count)
        return sequence

    def _turn(self, sequence: _Sequence, image_count: int) -> None:
        parts: list[dict[str, str]] = []
        self._text(sequence, f"{checkpoint.TURN_START}user\n")
        for _ in range(image_count):
            if self._rng.random() < 0.06:
                preamble = self._rng.choice(PREAMBLES) * self._rng.randint(1, 3)
                self._text(sequence, preamble)
                parts.append({"type": "text", "text": preamble})
            self._picture(sequence, self._rng.choice(self._pool))
            parts.append({"type": "image"})
        question = shapes.ask(self._rng, [picture.scene for picture in sequence.pictures])
        parts.append({"type": "text", "text": question.text})
        self._text(sequence, question.text)
        self._text(sequence, f"{checkpoint.TURN_END}\n{checkpoint.TURN_START}assistant\n")
        self._text(sequence, question.answer + checkpoint.TURN_END, learn=True)
        self._text(sequence, "\n")
        sequence.messages.append({"role": "user", "content": parts})
        sequence.messages.append({"role": "assistant", "content": question.answer})

    def _picture(self, sequence: _Sequence, picture: Picture) -> None:
        """Lay out a picture with Qwen2-VL's three-part positions, then its label."""
        self._text(sequence, checkpoint.VISION_START)
        count, start = picture.rows * picture.columns, sequence.next_position
        sequence.ids.extend([self._ids[checkpoint.IMAGE_PAD]] * count)
        sequence.targets.extend([IGNORED] * count)
        sequence.scene_targets.extend([_NO_SCENE] * count)
        sequence.positions.extend(
            (start, start + row, start + column)
            for row in range(picture.rows)
            for column in range(picture.columns)
        )
        sequence.next_position += max(picture.rows, picture.columns)
        sequence.pictures.append(picture)
        self._text(sequence, checkpoint.VISION_END)
        self._text(sequence, f"#{len(sequence.pictures)}\n")

    def _text(self, sequence: _Sequence, text: str, learn: bool = False) -> None:
        ids = self._encode(text)
        start = sequence.next_position
        sequence.ids.extend(ids)
        sequence.targets.extend(ids if learn else [IGNORED] * len(ids))
        sequence.positions.extend((place,) * 3 for place in range(start, start + len(ids)))
        sequence.next_position += len(ids)
        for token in ids:
            number = int(self._label_ids.get(token, "#0")[1:])
            known = 0 < number <= len(sequence.pictures)
            sequence.scene_targets.append(
                scene_targets(sequence.pictures[number - 1].scene) if known else _NO_SCENE
            )

    def _encode(self, text: str) -> list[int]:
        if text not in self._encoded:
            self._encoded[text] = self._tokenizer(text, add_special_tokens=False).input_ids
        return self._encoded[text]

    def _pad(self, sequences: list[_Sequence]) -> Batch:
        shape = (len(sequences), max(len(sequence.ids) for sequence in sequences))
        batch = Batch(
            input_ids=torch.full(shape, self._ids[checkpoint.END_OF_TEXT]),
            attention_mask=torch.zeros(shape, dtype=torch.long),
            positions=torch.ones((3, *shape), dtype=torch.long),
            targets=torch.full(shape, IGNORED),
            scene_targets=torch.full((*shape, 3), IGNORED),
            features=torch.cat([p.features for s in sequences for p in s.pictures]),
        )
        for row, sequence in enumerate(sequences):
            end = len(sequence.ids)
            batch.input_ids[row, :end] = torch.tensor(sequence.ids)
            batch.attention_mask[row, :end] = 1
            batch.positions[:, row, :end] = torch.tensor(sequence.positions).T
            batch.targets[row, :end] = torch.tensor(sequence.targets)
            batch.scene_targets[row, :end] = torch.tensor(sequence.scene_targets)
        return batch
