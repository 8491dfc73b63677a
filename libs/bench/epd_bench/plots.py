"""Plots of a result as PNG files."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from epd_bench.errors import BenchError
from epd_bench.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def check_plots() -> None:
    """Look before a run whether plots can be made.

    Raises:
        BenchError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401 - only whether it is there
    except ImportError:
        raise BenchError(
            "plots need matplotlib: install `epdflow[bench]`, or give --no-plots"
        ) from None


def plots(result: Result) -> dict[str, bytes]:
    """The plots by their file names."""
    found = {}
    if result.requests:
        found["times.png"] = _png(_distributions(result))
        found["course.png"] = _png(_course(result))
    if result.goodput is not None:
        found["goodput.png"] = _png(_probes(result))
    return found


def _figure(width: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure  # the program does without it until here

    figure = Figure(figsize=(4.5 * width, 3.4), layout="constrained")
    axes = [figure.add_subplot(1, width, place + 1) for place in range(width)]
    for one in axes:
        one.grid(True, alpha=0.3)
    return figure, axes


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _distributions(result: Result) -> Figure:
    good = [outcome for outcome in result.requests if not outcome.failure]
    figure, axes = _figure(3)
    values = (
        ("time to first token, s", [o.ttft_s for o in good]),
        ("time per output token, ms", [o.tpot_s * 1e3 for o in good if o.tpot_s >= 0]),
        ("whole answer, s", [o.e2e_s for o in good]),
    )
    for axis, (name, times) in zip(axes, values, strict=True):
        ordered = sorted(times)
        axis.plot(ordered, [(rank + 1) / len(ordered) for rank in range(len(ordered))])
        axis.set_xlabel(name)
        axis.set_ylim(0, 1)
    axes[0].set_ylabel("share of requests")
    return figure


def _course(result: Result) -> Figure:
    figure, (axis,) = _figure()
    figure.set_figwidth(9)
    kinds = sorted({outcome.images for outcome in result.requests})
    for images in kinds[:8]:
        chosen = [o for o in result.requests if o.images == images and not o.failure]
        label = f"{images} images"
        axis.plot([o.at_s for o in chosen], [o.ttft_s for o in chosen], ".", label=label)
    failed = [outcome.at_s for outcome in result.requests if outcome.failure]
    axis.plot(failed, [0.0] * len(failed), "rx", label="failed")
    axis.set_xlabel("sent at, s")
    axis.set_ylabel("time to first token, s")
    axis.legend(fontsize="small")
    return figure


def _probes(result: Result) -> Figure:
    assert result.goodput is not None
    figure, (axis,) = _figure()
    for passed, colour in ((True, "tab:green"), (False, "tab:red")):
        probes = [probe for probe in result.goodput.probes if probe.passed is passed]
        shares = [probe.kept / max(1, probe.sent) for probe in probes]
        label = "met the SLO" if passed else "did not"
        axis.plot([probe.rate for probe in probes], shares, "o", color=colour, label=label)
    axis.axvline(result.goodput.rate, color="grey", linestyle=":")
    axis.set_xscale("log")
    axis.set_xlabel("requests/s")
    axis.set_ylabel("share within bounds, of those sent")
    axis.legend(fontsize="small")
    return figure
