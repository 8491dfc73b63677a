"""Measure the checkpoint's exact-match accuracy through vLLM on the CPU.

Every question is a chat request of its own, with the pictures as PNG data URIs and at temperature
0, over scenes, sizes and tints from a seed that training never used. Exits with 1 below the bar.

    python -m models.evaluate --model models/shapes-qwen2vl
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from epd_vllm.compat import prepare_environment
from models import shapes

if TYPE_CHECKING:
    from vllm import LLM

HELD_OUT_SEED = 20_000
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "2",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One request and its right answer."""

    question: shapes.Question
    sizes: tuple[tuple[int, int], ...]
    messages: list[dict[str, object]]


def make_cases(count: int, seed: int) -> Iterator[Case]:
    """Make requests with 1 to 6 pictures, each side of each picture drawn by itself."""
    rng = random.Random(seed)
    for _ in range(count):
        scenes = [shapes.random_scene(rng) for _ in range(rng.randint(1, shapes.MAX_IMAGES))]
        sizes = tuple(shapes.random_size(rng) for _ in scenes)
        question = shapes.ask(rng, scenes)
        content: list[dict[str, object]] = [
            {
                "type": "image_url",
                "image_url": {"url": shapes.data_uri(shapes.draw(scene, *size, rng))},
            }
            for scene, size in zip(scenes, sizes, strict=True)
        ]
        content.append({"type": "text", "text": question.text})
        yield Case(question, sizes, [{"role": "user", "content": content}])


def load(model: Path) -> LLM:
    """Start vLLM in this process."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    prepare_environment()
    from vllm import LLM  # here, not above: it reads the environment when imported

    return LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=8,
        kv_cache_memory_bytes=128 << 20,
        limit_mm_per_prompt={"image": shapes.MAX_IMAGES, "video": 0},
        distributed_executor_backend="uni",
        disable_log_stats=True,
    )


def evaluate(llm: LLM, cases: list[Case], batch: int = 20) -> list[str]:
    """Return the model's answers, a batch of requests at a time."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=96)
    answers: list[str] = []
    started = time.monotonic()
    for first in range(0, len(cases), batch):
        chats = [case.messages for case in cases[first : first + batch]]
        outputs = llm.chat(chats, greedy, use_tqdm=False)
        answers.extend(output.outputs[0].text for output in outputs)
        right = sum(a == c.question.answer for a, c in zip(answers, cases, strict=False))
        elapsed_s = time.monotonic() - started
        print(f"{len(answers)}/{len(cases)} asked, {right} right, {elapsed_s:.0f} s", flush=True)
    return answers


def report(cases: list[Case], answers: list[str]) -> float:
    """Print a table by kind of question and number of pictures; return the share that is right."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for case, answer in zip(cases, answers, strict=True):
        is_right = answer == case.question.answer
        for row in (case.question.kind, f"{len(case.sizes)} images", "all"):
            total[row] += 1
            right[row] += is_right
        if not is_right:
            print(f"wrong: {case.question}, got {answer!r}, sizes {case.sizes}")
    by_images = [f"{number} images" for number in range(1, shapes.MAX_IMAGES + 1)]
    print("\n| questions | right | of | % |\n| --- | ---: | ---: | ---: |")
    for row in (*shapes.QUESTION_KINDS, *by_images, "all"):
        if total[row]:
            print(f"| {row} | {right[row]} | {total[row]} | {right[row] / total[row]:.1%} |")
    return right["all"] / total["all"]


def main() -> int:
    """Evaluate from the command line."""
    parser = argparse.ArgumentParser(description="Measure the shapes checkpoint through vLLM.")
    default = Path(__file__).with_name("shapes-qwen2vl")
    parser.add_argument("--model", type=Path, default=default)
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED)
    parser.add_argument("--bar", type=float, default=0.97, help="least share of right answers")
    options = parser.parse_args()
    cases = list(make_cases(options.questions, options.seed))
    accuracy = report(cases, evaluate(load(options.model), cases))
    return 0 if accuracy >= options.bar else 1


if __name__ == "__main__":
    sys.exit(main())
