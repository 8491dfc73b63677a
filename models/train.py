"""Train the checkpoint that answers questions about synthetic pictures, on two CPU cores.

First the vision part alone, until every merged token tells shape, colour and background; then the
language part on the frozen vision part's features. The work is counted in steps, never in seconds,
so one seed gives one model on one kind of machine.

    python -m models.train --out models/shapes-qwen2vl
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import nn
from torch.nn import functional

from epd_vllm.compat import prepare_environment
from models import checkpoint, conversations, network, shapes

VOCABULARY = 512
VISION_PATCHES = 2000
VISION_RATE, LANGUAGE_RATE = 1.2e-3, 2e-3
LEVELS = (2, 3, 4, shapes.MAX_IMAGES)
"""How many pictures a conversation has at most: more once the answers are mostly right."""
LEVEL_PASSED = 0.965
VISION_PASSED = 0.9995
REPORT_STEPS = 25


class Progress:
    """Running means over the last steps, printed now and then."""

    def __init__(self, phase: str, steps: int, names: tuple[str, ...]) -> None:
        self._phase, self._steps, self._names = phase, steps, names
        self._recent: deque[tuple[float, ...]] = deque(maxlen=REPORT_STEPS)
        self._started = time.monotonic()
        self.step = 0

    def add(self, *values: float) -> None:
        """Note one finished step."""
        self._recent.append(values)
        self.step += 1
        if self.step % REPORT_STEPS == 0:
            self.report()

    def mean(self, name: str) -> float:
        """Return the mean of one value over the last ``REPORT_STEPS`` steps; 0 before that many."""
        if len(self._recent) < REPORT_STEPS:
            return 0.0
        column = self._names.index(name)
        return float(np.mean([values[column] for values in self._recent]))

    def report(self) -> None:
        """Print where the phase stands."""
        means = np.mean(self._recent, axis=0)
        shown = "  ".join(f"{n} {m:.4f}" for n, m in zip(self._names, means, strict=True))
        elapsed_s = time.monotonic() - self._started
        print(f"{self._phase} {self.step}/{self._steps}  {elapsed_s:.0f} s  {shown}", flush=True)


def optimiser(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Make the optimiser of either phase; its rate is set at every step."""
    return torch.optim.AdamW(parameters, weight_decay=0.02, betas=(0.9, 0.98))


def step(optimizer: torch.optim.AdamW, loss: torch.Tensor, rate: float) -> None:
    """Apply one clipped gradient step."""
    optimizer.zero_grad()
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = rate
        nn.utils.clip_grad_norm_(group["params"], 1.0)
    optimizer.step()


def random_pictures(
    rng: random.Random, size: tuple[int, int]
) -> tuple[list[shapes.Scene], list[np.ndarray]]:
    """Draw as many pictures of one size as make a batch for the vision part."""
    height, width = size
    patches = (height // network.PATCH_PX) * (width // network.PATCH_PX)
    scenes = [shapes.random_scene(rng) for _ in range(max(8, VISION_PATCHES // patches))]
    return scenes, [np.asarray(shapes.draw(scene, height, width, rng)) for scene in scenes]


def train_vision(tower: nn.Module, steps: int, rng: random.Random) -> None:
    """Teach every merged token to tell what its picture shows; stops early when all do."""
    heads = network.AttributeHeads()
    optimizer = optimiser([*tower.parameters(), *heads.parameters()])
    progress = Progress("vision", steps, ("loss", "shape", "colour", "background"))
    while progress.step < steps:
        done = progress.step / steps
        small = done < 0.3  # many small pictures first: more different scenes in a step
        size = rng.choice([(56, 56), (56, 84), (84, 56)]) if small else shapes.random_size(rng)
        scenes, pictures = random_pictures(rng, size)
        features = network.picture_features(tower, pictures)
        targets = torch.tensor([network.scene_targets(scene) for scene in scenes])
        targets = targets.repeat_interleave(features.shape[1], 0)
        loss, accuracies = heads(features.flatten(0, 1), targets, (1.0, 0.4, 0.2))
        warm_up = min(1.0, (progress.step + 1) / 50)
        step(optimizer, loss, VISION_RATE * warm_up * (0.55 + 0.45 * math.cos(math.pi * done)))
        progress.add(loss.item(), *accuracies)
        worst = min(progress.mean(name) for name in ("shape", "colour", "background"))
        if done > 0.5 and worst > VISION_PASSED:
            break
    progress.report()


@torch.no_grad()
def make_pool(tower: nn.Module, size: int, rng: random.Random) -> list[conversations.Picture]:
    """Run the frozen vision part once over the pictures that all conversations draw from."""
    pool: list[conversations.Picture] = []
    while len(pool) < size:
        height, width = shapes.random_size(rng)
        scenes, pictures = random_pictures(rng, (height, width))
        rows, columns = height // shapes.CELL_PX, width // shapes.CELL_PX
        features = network.picture_features(tower, pictures)
        pool.extend(
            conversations.Picture(scene, rows, columns, feature.clone())
            for scene, feature in zip(scenes, features, strict=True)
        )
    return pool


def train_language(
    model: transformers.Qwen2VLForConditionalGeneration,
    writer: conversations.Writer,
    steps: int,
    token_budget: int,
) -> None:
    """Teach the language part to answer, with more and more pictures in a conversation.

    Helper heads read image k's attributes at every label ``#k``. Without them the model does not
    learn to tell several pictures apart within the time; they are thrown away afterwards.
    """
    language, image_pad = model.model.language_model, model.config.image_token_id
    heads = network.AttributeHeads()
    parameters = [p for name, p in model.named_parameters() if "visual" not in name]
    optimizer = optimiser([*parameters, *heads.parameters()])
    progress = Progress("language", steps, ("loss", "token_accuracy", "label_accuracy"))
    level, level_since = 0, 0
    while progress.step < steps:
        batch = writer.batch(LEVELS[level], token_budget)
        embedded = language.embed_tokens(batch.input_ids)
        at_pictures = (batch.input_ids == image_pad).unsqueeze(-1)
        hidden = language(
            inputs_embeds=embedded.masked_scatter(at_pictures, batch.features),
            attention_mask=batch.attention_mask,
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        answered = batch.targets[:, 1:] != network.IGNORED
        logits, targets = model.lm_head(hidden[:, :-1][answered]), batch.targets[:, 1:][answered]
        loss = functional.cross_entropy(logits, targets)
        labelled = batch.scene_targets[..., 0] != network.IGNORED
        label_loss, label_accuracies = heads(
            hidden[labelled], batch.scene_targets[labelled], (0.5, 0.5, 0.5)
        )
        left = 1 - progress.step / steps
        rate = LANGUAGE_RATE * min(1.0, (progress.step + 1) / 30) * min(1.0, max(0.03, left / 0.35))
        step(optimizer, loss + label_loss, rate)
        token_accuracy = (logits.argmax(-1) == targets).float().mean().item()
        progress.add(loss.item(), token_accuracy, min(label_accuracies))
        passed = progress.mean("token_accuracy") > LEVEL_PASSED
        if passed and level + 1 < len(LEVELS) and progress.step - level_since > REPORT_STEPS:
            level, level_since = level + 1, progress.step
            print(f"language {progress.step}: up to {LEVELS[level]} pictures", flush=True)


def train(out: Path, seed: int, vision_steps: int, language_steps: int, tokens: int) -> None:
    """Train from nothing and write the checkpoint into ``out``."""
    started = time.monotonic()
    torch.manual_seed(seed)
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = checkpoint.make_tokenizer(
        conversations.corpus(random.Random(0)),
        VOCABULARY,
        checkpoint.chat_template(label_images=True),
        conversations.LABELS,
    )
    model = network.make_model(tokenizer)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(tokenizer)} tokens, {count / 1e6:.2f} M parameters", flush=True)
    tower = model.model.visual
    with network.batched_vision():
        train_vision(tower, vision_steps, rng)
        _, pictures = random_pictures(rng, (112, 112))
        network.match_scales(model, network.picture_features(tower, pictures))
        pool = make_pool(tower, 4000, rng)
    print(f"{len(pool)} pictures pooled, {time.monotonic() - started:.0f} s", flush=True)
    writer = conversations.Writer(tokenizer, pool, rng)
    writer.check_layout()
    train_language(model, writer, language_steps, tokens)
    checkpoint.save_weights(model.to(torch.bfloat16), out)
    checkpoint.write_side_files(
        out,
        tokenizer,
        processor_class="Qwen2VLProcessor",
        video_processor_type="Qwen2VLVideoProcessor",
        patch_size=network.PATCH_PX,
        max_pixels=1280 * 28 * 28,
    )
    print(f"saved in {out}, {time.monotonic() - started:.0f} s in all", flush=True)


def main() -> None:
    """Train from the command line."""
    parser = argparse.ArgumentParser(description="Train the shapes checkpoint on the CPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vision-steps", type=int, default=500)
    parser.add_argument("--language-steps", type=int, default=1400)
    parser.add_argument("--tokens", type=int, default=4000, help="in a language step")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    prepare_environment()
    torch.set_num_threads(options.threads)
    train(options.out, options.seed, options.vision_steps, options.language_steps, options.tokens)


if __name__ == "__main__":
    main()
