"""What a run found: the verdict, and its results as JSON, a plot and a page."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.chaos.faults import Fault
from bench.chaos.load import Outcome

ANSWERED_SHARE = 0.99
GROWTH, GROWTH_BYTES = 1.25, 24 << 20
"""Memory of a role in the last third of a run: so many times that of the first and so much more, at most."""

GROWN_UP_S = 10.0
"""A process that is younger has not loaded everything yet."""

ROLES = ("gateway", "encoder", "pd", "prefill", "decode", "nats", "valkey")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All that a run found."""

    seed: int
    rate: float
    every_s: float
    requests: int
    lasted_s: float
    limit_s: float
    machine: str
    date: str
    outcomes: list[Outcome]
    faults: list[Fault]
    memory: list[dict[str, Any]]
    late: list[str]
    differences: list[str]
    notes: list[str]
    totals: dict[str, dict[str, int]]
    letters: int
    pending: dict[str, int]
    sent_again: int

    @property
    def ended(self) -> Counter[str]:
        return Counter(outcome.ended for outcome in self.outcomes)


def verdict(run: Run) -> list[str]:
    """What does not hold; empty means passed. Pure."""
    ended = run.ended
    wrong = []
    numbers = Counter(outcome.number for outcome in run.outcomes)
    if sorted(numbers) != list(range(run.requests)) or max(numbers.values(), default=1) > 1:
        wrong.append(f"{run.requests} requests went in and {len(run.outcomes)} came out")
    if ended["never_ended"]:
        wrong.append(f"{ended['never_ended']} requests did not end within {run.limit_s:g} s")
    if ended["wrong"]:
        first = next(outcome for outcome in run.outcomes if outcome.ended == "wrong")
        wrong.append(f"{ended['wrong']} answers are wrong; request {first.number}: {first.detail}")
    if ended["answered"] < ANSWERED_SHARE * run.requests:
        others = {how: n for how, n in ended.items() if how != "answered"}
        wrong.append(f"only {ended['answered']} of {run.requests} were answered: {others}")
    if run.late:
        wrong.append(f"not serving again after the last fault: {', '.join(run.late)}")
    wrong += [f"accounts: {difference}" for difference in run.differences]
    for role, (first_bytes, last_bytes) in growth(run.memory).items():
        if last_bytes > GROWTH * first_bytes + GROWTH_BYTES:
            wrong.append(f"memory of {role} grew from {_mib(first_bytes)} to {_mib(last_bytes)}")
    return wrong


def growth(memory: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Median resident bytes of a role's processes in the first and in the last third of a run."""
    found: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for place, sample in enumerate(memory):
        third = 3 * place // len(memory)
        for name, (rss, age_s) in sample["seen"].items():
            if third != 1 and age_s >= GROWN_UP_S:
                found[name.partition("-")[0]][third // 2].append(rss)
    return {
        role: (statistics.median(first), statistics.median(last))
        for role, (first, last) in found.items()
        if first and last
    }


def roles(run: Run) -> list[str]:
    """Those of which there was a process."""
    seen = {name.partition("-")[0] for sample in run.memory for name in sample["seen"]}
    return [role for role in ROLES if role in seen | {fault.role for fault in run.faults}]


def _mib(size: float) -> str:
    return f"{size / (1 << 20):.0f} MiB"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def write(run: Run, folder: Path) -> None:
    """``chaos.json``, ``chaos.md`` and, where matplotlib is installed, ``chaos.png``."""
    found = asdict(run)
    found["memory"] = found["memory"][::5]
    (folder / "chaos.json").write_text(
        json.dumps({"verdict": verdict(run), "ended": run.ended, **found})
    )
    (folder / "chaos.md").write_text(page(run))
    plot(run, folder / "chaos.png")
    print(page(run))


def page(run: Run) -> str:
    """The results in words."""
    took = [outcome.took_s for outcome in run.outcomes if outcome.ended == "answered"]
    ended = run.ended
    answered = ended.pop("answered", 0)
    retried = sum(outcome.tries > 1 for outcome in run.outcomes)
    kinds = Counter((fault.role, fault.kind) for fault in run.faults)
    by = Counter(o.detail.partition("-")[0] for o in run.outcomes if o.ended == "answered")
    lines = [
        "| | |",
        "| --- | --- |",
        f"| run | {run.requests} requests at {run.rate:g}/s in {run.lasted_s:.0f} s, seed {run.seed}, "
        f"{run.date}, {run.machine} |",
        f"| faults | {len(run.faults)}, one every {run.every_s:g} s |",
        f"| answered, and right | {answered} ({100 * answered / max(1, run.requests):.2f} %) |",
        *([f"| answered by | {_counts(by)} |"] if len(by) > 1 else []),
        f"| wrong answers | {ended.pop('wrong', 0)} |",
        f"| errors | {sum(ended.values())}: " + (_counts(ended) or "none") + " |",
        f"| sent to another gateway, or later again | {retried}; {run.sent_again} times since a gateway was "
        "lost before the first byte of its answer |",
        f"| time to the whole answer | p50 {percentile(took, 0.5):.2f} s, p90 "
        f"{percentile(took, 0.9):.2f} s, p99 {percentile(took, 0.99):.2f} s, longest "
        f"{max(took, default=0):.1f} s |",
        "| accounts afterwards | "
        + ("balanced" if not run.differences else "; ".join(run.differences))
        + (f" ({'; '.join(run.notes)})" if run.notes else "")
        + " |",
        f"| verdict | {'passed' if not verdict(run) else 'failed: ' + '; '.join(verdict(run))} |",
        "",
        "| role | killed | frozen for 3 s | restarted | memory, first third | last third |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    sizes = growth(run.memory)
    for role in roles(run):
        first, last = sizes.get(role, (0.0, 0.0))
        counts = " | ".join(str(kinds[role, kind]) for kind in ("kill", "freeze", "restart"))
        lines.append(f"| {role} | {counts} | {_mib(first)} | {_mib(last)} |")
    return "\n".join(lines) + "\n"


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"`{what}` {n}" for what, n in counts.most_common())


def plot(run: Run, path: Path) -> None:
    """Answers, errors, times and memory over the run, with each fault."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = roles(run)
    bin_s = max(5.0, run.lasted_s / 120)
    bins = math.ceil(run.lasted_s / bin_s) or 1
    answered, failed = [0.0] * bins, [0.0] * bins
    took: list[list[float]] = [[] for _ in range(bins)]
    for outcome in run.outcomes:
        place = min(bins - 1, int(outcome.began_s / bin_s))
        if outcome.ended == "answered":
            answered[place] += 1 / bin_s
            took[place].append(outcome.took_s)
        else:
            failed[place] += 1 / bin_s
    times = [bin_s * (place + 0.5) for place in range(bins)]
    figure, (rates, latency, faults, memory) = pyplot.subplots(
        4, 1, figsize=(11, 9), sharex=True, height_ratios=(2, 2, 1.2, 2), layout="constrained"
    )
    beside = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
    rates.stackplot(times, answered, failed, labels=("answered", "error"), colors=("C0", "C3"))
    rates.set_ylabel("requests/s")
    rates.legend(**beside)
    rates.set_title(
        f"{run.requests} requests, {len(run.faults)} faults: "
        f"{100 * run.ended['answered'] / max(1, run.requests):.2f} % answered, "
        f"{run.ended['wrong']} wrong"
    )
    for share, style in ((0.5, "-"), (0.9, "--"), (0.99, ":")):
        values = [percentile(part, share) or None for part in took]
        latency.plot(times, values, style, color="C0", label=f"p{100 * share:.0f}")
    latency.set_yscale("log")
    latency.set_ylabel("s to whole answer")
    latency.legend(**beside)
    marks = {"kill": ("x", "C3"), "freeze": ("s", "C0"), "restart": ("o", "C2")}
    for kind, (mark, colour) in marks.items():
        some = [fault for fault in run.faults if fault.kind == kind]
        faults.scatter(
            [fault.at_s for fault in some],
            [rows.index(fault.role) for fault in some],
            marker=mark,
            s=12,
            color=colour,
            label=kind,
        )
    faults.set_yticks(range(len(rows)), rows)
    faults.invert_yaxis()
    faults.margins(y=0.15)
    faults.legend(**beside)
    for number, role in enumerate(rows):
        points = [
            (sample["at_s"], rss / (1 << 20))
            for sample in run.memory
            for name, (rss, _) in sample["seen"].items()
            if name.partition("-")[0] == role
        ]
        if points:
            memory.scatter(*zip(*points, strict=True), s=2, color=f"C{number}", label=role)
    memory.set_ylim(bottom=0)
    memory.set_ylabel("MiB resident")
    memory.set_xlabel("s")
    memory.legend(markerscale=4, **beside)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
