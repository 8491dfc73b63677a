"""Load generators of others beside `epd bench`, against one server: do they see the same time to first token?

    python -m bench.outside --vllm PATH --aiperf PATH [--url URL] [--images 2] [--rate 4] [--requests 40]

Runs all three in turn, round by round, each as its own program with options that ask the same: so many
pictures of 256 x 256 px as JPEG, all different, some 108 tokens of text as the server counts, 32 tokens of
answer, Poisson arrivals. docs/benchmarks.md says how to install the two.

TTFT p50 should differ by less than 5 % or 2 ms. On a machine with other load that says little, so for the
same requests the gateway's own mean is looked up as well, from arrival to the first byte sent: what a client
sees beyond it is the client's own way of counting.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd_bench.result import this_machine
from epd_vllm.compat import CHILD_SITE

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "models" / "shapes-qwen2vl"

TEXT_TOKENS = {"epd bench": 108, "vllm bench serve": 200, "aiperf": 285}
"""What each is asked for, so that the simulated engine counts about 108: the tokenizer at hand knows few
words, and its random tokens are shorter than the four bytes that the engine takes for one."""

ANSWER_TOKENS = 32
SIDE = 256
LIMIT_S = 170.0
SETTLE_S = 5.0
"""Before each, as the processes of the one before take some seconds to end."""

CLOSE_SHARE, CLOSE_MS = 0.05, 2.0


@dataclass(frozen=True, slots=True)
class Ask:
    """What all are to ask; ``seed`` differs by round, as a picture seen before is not encoded again."""

    url: str
    model: str
    images: int
    rate: float
    requests: int
    seed: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What one saw: TTFT in ms, tokens of a prompt as the server counts, and answers that came."""

    ttft_ms: float
    mean_ms: float
    prompt_tokens: float
    answered: int


def epd_bench(ask: Ask, folder: Path) -> Seen:
    """This project's."""
    out = folder / "epd"
    options = {
        "--url": ask.url,
        "--workload": "random-mm",
        "--images": ask.images,
        "--sizes": f"{SIDE}x{SIDE}",
        "--text": TEXT_TOKENS["epd bench"],
        "--output": ANSWER_TOKENS,
        "--rate": ask.rate,
        "--requests": ask.requests,
        "--seed": ask.seed,
        "--warmup": 0,  # the gateway would count them
        "--out": out,
    }
    _run([sys.executable, "-m", "epd_cli", "bench", "--no-plots"], options)
    result = json.loads((out / "result.json").read_text())
    prompts = [each["prompt_tokens"] for each in result["requests"]]
    summary = result["summary"]
    ttft = summary["ttft"]
    return Seen(
        1e3 * ttft["p50"], 1e3 * ttft["mean"], statistics.mean(prompts), summary["answered"]
    )


def vllm_bench(program: Path, ask: Ask, folder: Path) -> Seen:
    """``vllm bench serve``."""
    file = folder / "vllm.json"
    options = {
        "--backend": "openai-chat",
        "--base-url": ask.url,
        "--endpoint": "/v1/chat/completions",
        "--model": ask.model,
        "--tokenizer": TOKENIZER,
        "--dataset-name": "random-mm" if ask.images else "random",
        "--random-input-len": TEXT_TOKENS["vllm bench serve"],
        "--random-output-len": ANSWER_TOKENS,
        "--num-prompts": ask.requests,
        "--request-rate": ask.rate,
        "--seed": ask.seed,
        "--result-filename": file,
    }
    if ask.images:
        options |= {
            "--random-mm-base-items-per-request": ask.images,
            "--random-mm-num-mm-items-range-ratio": 0,
            "--random-mm-limit-mm-per-prompt": json.dumps({"image": ask.images, "video": 0}),
            "--random-mm-bucket-config": f"{{({SIDE},{SIDE},1):1.0}}",
        }
    _run(
        [program, "bench", "serve", "--ignore-eos", "--disable-tqdm", "--save-result"],
        options,
        # The CPU build of vLLM is mended by this in each process; another build does not mind.
        {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(CHILD_SITE)},
    )
    result = json.loads(file.read_text())
    completed = int(result["completed"])
    return Seen(
        result["median_ttft_ms"],
        result["mean_ttft_ms"],
        result["total_input_tokens"] / max(1, completed),
        completed,
    )


def aiperf(program: Path, ask: Ask, folder: Path) -> Seen:
    """AIPerf."""
    options = {
        "--model": ask.model,
        "--url": ask.url,
        "--endpoint-type": "chat",
        "--tokenizer": TOKENIZER,
        "--prompt-input-tokens-mean": TEXT_TOKENS["aiperf"],
        "--prompt-output-tokens-mean": ANSWER_TOKENS,
        "--request-rate": ask.rate,
        "--arrival-pattern": "poisson",
        "--request-count": ask.requests,
        "--random-seed": ask.seed,
        "--extra-inputs": "ignore_eos:true",
        "--ui": "none",
        "--output-artifact-dir": folder / "aiperf",
    }
    if ask.images:
        options |= {
            "--image-width-mean": SIDE,
            "--image-height-mean": SIDE,
            "--image-batch-size": ask.images,
            "--image-format": "jpeg",
        }
    flags = ("--streaming", "--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics")
    _run([program, "profile", *flags], options)
    result = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    return Seen(
        result["time_to_first_token"]["p50"],
        result["time_to_first_token"]["avg"],
        result["usage_prompt_tokens"]["avg"],
        int(result["request_count"]["avg"]),
    )


def gateway_ttft(url: str) -> tuple[float, float]:
    """Of all requests so far: the sum of times to the first byte, in seconds, and their number."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    found = {}
    for which in ("sum", "count"):
        begin = f"epd_gateway_time_to_first_token_seconds_{which}{{"
        values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(begin)]
        found[which] = sum(values)
    return found["sum"], found["count"]


def close(ours_ms: float, other_ms: float) -> bool:
    """Whether two times to first token are the same for what this is about."""
    return abs(other_ms - ours_ms) <= max(CLOSE_MS, CLOSE_SHARE * ours_ms)


def _run(
    program: Sequence[str | Path],
    options: Mapping[str, object],
    environment: Mapping[str, str] | None = None,
) -> None:
    command = [str(part) for part in (*program, *itertools.chain(*options.items()))]
    inherited = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        command,
        env=inherited | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        shown = (done.stdout + done.stderr)[-2000:]
        raise RuntimeError(f"{' '.join(command[:3])} ended with {done.returncode}:\n{shown}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.outside", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="sim")
    parser.add_argument("--vllm", type=Path, help="the program `vllm`")
    parser.add_argument("--aiperf", type=Path, help="the program `aiperf`")
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tools: dict[str, Callable[[Ask, Path], Seen]] = {"epd bench": epd_bench}
    if arguments.vllm:
        tools["vllm bench serve"] = lambda ask, folder: vllm_bench(arguments.vllm, ask, folder)
    if arguments.aiperf:
        tools["aiperf"] = lambda ask, folder: aiperf(arguments.aiperf, ask, folder)
    seen: dict[str, list[Seen]] = {name: [] for name in tools}
    beyond: dict[str, list[float]] = {name: [] for name in tools}
    for number in range(arguments.rounds):
        for place, (name, tool) in enumerate(tools.items()):
            ask = Ask(
                url=arguments.url,
                model=arguments.model,
                images=arguments.images,
                rate=arguments.rate,
                requests=arguments.requests,
                seed=1000 * arguments.seed + 10 * number + place,
            )
            with tempfile.TemporaryDirectory(prefix="epd-bench-") as folder:
                time.sleep(SETTLE_S)
                before = gateway_ttft(arguments.url)
                found = tool(ask, Path(folder))
                after = gateway_ttft(arguments.url)
            seen[name].append(found)
            mean_ms = 1e3 * (after[0] - before[0]) / (after[1] - before[1])
            beyond[name].append(found.mean_ms - mean_ms)
            print(
                f"  round {number + 1}: {name}: p50 {found.ttft_ms:.1f} ms, mean {found.mean_ms:.1f} ms, "
                f"of which the gateway's {mean_ms:.1f} ms",
                file=sys.stderr,
            )
    report = {
        "machine": f"{this_machine().processor}, {this_machine().cores} cores",
        "images": arguments.images,
        "rate": arguments.rate,
        "requests": arguments.requests,
        "tools": {name: _shown(name, seen, beyond) for name in seen},
    }
    print(json.dumps(report, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    return 0


def _shown(
    name: str, seen: Mapping[str, list[Seen]], beyond: Mapping[str, list[float]]
) -> dict[str, Any]:
    ours = statistics.median(each.ttft_ms for each in seen["epd bench"])
    found = statistics.median(each.ttft_ms for each in seen[name])
    return {
        "ttft_p50_ms": round(found, 1),
        "rounds_ms": [round(each.ttft_ms, 1) for each in seen[name]],
        "prompt_tokens": round(statistics.mean(each.prompt_tokens for each in seen[name]), 1),
        "answered": sum(each.answered for each in seen[name]),
        "close": close(ours, found),
        "beyond_gateway_ms": [round(each, 1) for each in beyond[name]],
    }


if __name__ == "__main__":
    sys.exit(main())
