"""What ``bench.gpu_epd`` measures, step by step; each gives a mapping of plain numbers."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.gpu_model import Decoder, VisionTower, prefill
from epd_common.store import Arena
from epd_vllm.embedding_io import map_tensor, seal, write_staged

ROUNDS = 20
WARM_UP = 2


@dataclass(slots=True)
class Budget:
    """Seconds of one section. What does not fit is left out, and named."""

    seconds: float
    began: float = field(default_factory=time.monotonic)
    left_out: list[str] = field(default_factory=list)

    @property
    def spent(self) -> bool:
        """Whether nothing new may begin."""
        return time.monotonic() - self.began > self.seconds

    def each(self, names: Iterator[str] | list[str]) -> Iterator[str]:
        """Names as long as there is time."""
        for name in names:
            if self.spent:
                self.left_out.append(name)
            else:
                yield name


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    pictures: tuple[tuple[int, int], ...]
    prompts: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]  # sequences, tokens before
    moves_mb: tuple[int, ...]
    late_pictures: int
    late_px: tuple[int, int]
    gap_s: float
    late_text: int


LARGE = Scale(
    pictures=((224, 224), (448, 448), (1280, 720), (1920, 1080)),
    prompts=(512, 2048, 8192),
    decodes=((1, 2048), (8, 2048), (32, 2048)),
    moves_mb=(1, 8, 28, 67),
    late_pictures=4,
    late_px=(1280, 720),
    gap_s=0.25,
    late_text=256,
)
SMALL = Scale(
    pictures=((112, 112), (224, 168)),
    prompts=(64, 256),
    decodes=((1, 64), (4, 64)),
    moves_mb=(1, 8),
    late_pictures=3,
    late_px=(112, 112),
    gap_s=0.05,
    late_text=16,
)


def settle(like: Any) -> None:
    """Wait for the device."""
    if like.device.type == "cuda":
        torch.cuda.synchronize()


def timed(
    like: Any, act: Callable[[], object], budget: Budget, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Median and spread in ms; at least one round that counts, and no new one once time is over."""
    times: list[float] = []
    for number in range(WARM_UP + rounds):
        if times and budget.spent:
            break
        settle(like)
        began = time.perf_counter()
        act()
        settle(like)
        if number >= WARM_UP or budget.spent:
            times.append((time.perf_counter() - began) * 1e3)
    return spread(times)


def spread(times_ms: list[float]) -> dict[str, Any]:
    """Median, p10 and p90 of some ms."""
    ordered = sorted(times_ms)
    ends = (len(ordered) - 1) // 10
    return {
        "ms": round(statistics.median(ordered), 3),
        "ms_p10": round(ordered[ends], 3),
        "ms_p90": round(ordered[-1 - ends], 3),
        "rounds": len(ordered),
    }


def encode_times(tower: VisionTower, like: Any, scale: Scale, budget: Budget) -> dict[str, Any]:
    """The vision tower, by the size of a picture."""
    found = {}
    sizes = {f"{wide}x{high}": (wide, high) for wide, high in scale.pictures}
    for name in budget.each(list(sizes)):
        patches = tower.patches(*sizes[name])
        rows = tower.encode(patches)
        took = timed(like, lambda patches=patches: tower.encode(patches), budget)  # type: ignore[misc]
        found[name] = took | {"rows": rows.shape[0], "mb": round(rows.nbytes / 1e6, 2)}
    return found


def prefill_times(decoder: Decoder, like: Any, scale: Scale, budget: Budget) -> dict[str, Any]:
    """Prefill of one prompt, by its tokens."""
    found = {}
    for name in budget.each([str(tokens) for tokens in scale.prompts]):
        rows = decoder.text(1, int(name))
        act = lambda rows=rows: prefill(decoder, [rows], rows.shape[1])  # noqa: E731
        found[name] = timed(like, act, budget)
    return found


def decode_times(decoder: Decoder, like: Any, scale: Scale, budget: Budget) -> dict[str, Any]:
    """One step of decode, by sequences and the tokens that each has before it."""
    found = {}
    cases = {f"{batch} x {before}": (batch, before) for batch, before in scale.decodes}
    for name in budget.each(list(cases)):
        batch, before = cases[name]
        cache = decoder.cache(batch, before + 1)
        rows = decoder.text(batch, 1)

        def step(cache: Any = cache, rows: Any = rows, before: int = before) -> None:
            cache.length = before
            decoder.forward(rows, cache)

        found[name] = timed(like, step, budget)
    return found


def moves(
    like: Any, scale: Scale, arena: Arena, width: int, budget: Budget
) -> dict[str, dict[str, Any]]:
    """An embedding from the device into the arena and back: in parts, and as the services do it."""
    sizes = {f"{mb} MB": mb * 10**6 for mb in scale.moves_mb}
    found = {}
    for name in budget.each(list(sizes)):
        rows = max(1, sizes[name] // (width * like.element_size()))
        there = torch.randn(rows, width, device=like.device).to(like.dtype)
        found[name] = _moves_of(there, like, arena, budget)
    return found


def _moves_of(there: Any, like: Any, arena: Arena, budget: Budget) -> dict[str, Any]:
    host = torch.empty(there.shape, dtype=there.dtype, pin_memory=like.device.type == "cuda")
    back = torch.empty_like(there)
    key = secrets.token_hex(32)

    def write(tensor: Any) -> None:
        arena.discard(key)
        publish(arena, key, tensor)

    def read() -> None:
        back.copy_(map_tensor(arena.root / "data" / key))

    def whole() -> None:
        write(there)
        read()

    whole()
    if not torch.equal(back, there):
        raise RuntimeError("what came back from the arena is not what was written")
    host.copy_(there)
    parts = {
        "device to pinned": lambda: host.copy_(there),
        "pinned to device": lambda: back.copy_(host),
        "pinned to arena, sealed": lambda: write(host),
        "device to arena, sealed": lambda: write(there),
        "arena to device": read,
        "device to arena to device": whole,
    }
    found = {}
    for part, act in parts.items():
        took = timed(like, act, budget)
        found[part] = took | {"gb_s": round(there.nbytes / took["ms"] / 1e6, 2)}
    arena.discard(key)
    return found


def publish(arena: Arena, key: str, tensor: Any) -> None:
    """Into the arena as an encoder does it: written, looked at for values that are not finite, summed."""
    write_staged(arena.staging, key, tensor)
    staged = arena.staging / key
    arena.adopt(staged, seal(staged, key=key, fingerprint="", metadata={}))


def early_prefill(
    tower: VisionTower, decoder: Decoder, like: Any, scale: Scale, arena: Arena, budget: Budget
) -> dict[str, Any]:
    """From the last picture's arrival to the first token's logits: waiting for all, or starting at once.

    Pictures lie in the arena and come one every ``gap_s``. Both ways read each of them from there and give
    the same rows to the decoder; the logits must agree.
    """
    paths = []
    for _ in range(scale.late_pictures):
        key = secrets.token_hex(32)
        publish(arena, key, tower.encode(tower.patches(*scale.late_px)))
        paths.append(arena.root / "data" / key)
    text = decoder.text(1, scale.late_text)
    taken: dict[str, list[float]] = {"waiting": [], "early": []}
    logits: dict[str, Any] = {}
    for number in range(WARM_UP + ROUNDS):
        for way, times in taken.items():
            if times and budget.spent:
                continue
            after_ms, logits[way] = _late(
                decoder, like, text, paths, scale.gap_s, early=way == "early"
            )
            if number >= WARM_UP or budget.spent:
                times.append(after_ms)
    apart = (logits["early"] - logits["waiting"]).abs().max() / logits["waiting"].abs().max()
    return {
        "pictures": scale.late_pictures,
        "tokens": scale.late_text + sum(map_tensor(path).shape[0] for path in paths),
        "gap_s": scale.gap_s,
        "logits_apart": round(float(apart), 4),
        **{way: spread(times) for way, times in taken.items()},
    }


def _late(
    decoder: Decoder, like: Any, text: Any, paths: list[Path], gap_s: float, *, early: bool
) -> tuple[float, Any]:
    """ms from the last arrival to the logits, and those."""
    room = text.shape[1] + sum(map_tensor(path).shape[0] for path in paths)
    cache = decoder.cache(1, room)
    settle(like)
    began = time.perf_counter()
    held = [text]
    logits = None
    for number, path in enumerate(paths):
        if early and held:  # what is there is prefilled while the next one is made
            logits = decoder.forward(torch.cat(held, dim=1), cache)
            held = []
        arrives = began + (number + 1) * gap_s
        time.sleep(max(0.0, arrives - time.perf_counter()))
        held.append(map_tensor(path).to(like.device)[None])
    logits = decoder.forward(torch.cat(held, dim=1), cache)
    settle(like)
    return (time.perf_counter() - arrives) * 1e3, logits
