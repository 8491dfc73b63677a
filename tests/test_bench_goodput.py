"""What counts as good, and the search for the highest rate at which enough is."""

from __future__ import annotations

import pytest

from epd_bench.client import Outcome
from epd_bench.errors import BenchError
from epd_bench.goodput import NoRateError, Probe, find_goodput
from epd_bench.quantiles import quantiles
from epd_bench.slo import DEFAULT, parse_slo
from epd_bench.summary import keeps, summarise


def test_slo_with_and_without_images() -> None:
    slo = parse_slo("ttft=1+0.25*images, tpot=0.1, share=0.9")
    assert slo.keeps(4, 2.0, 0.1) and not slo.keeps(4, 2.01, 0.1) and not slo.keeps(4, 2.0, 0.11)
    assert slo.keeps(0, 1.0, None), "one token has no time per token"
    assert [slo.allowed(count) for count in (9, 10, 99, 100)] == [0, 1, 9, 10]
    assert parse_slo(DEFAULT) == parse_slo("default")
    blog = parse_slo("vllm-blog")
    assert blog.keeps(9, 20.0, 0.1) and not blog.keeps(9, 20.1, 0.1)


def test_slo_in_slower_time() -> None:
    slo = parse_slo("ttft=1+0.5*images,tpot=0.1").scaled(3)
    assert slo.keeps(2, 6.0, 0.3) and not slo.keeps(2, 6.1, 0.3) and not slo.keeps(2, 6.0, 0.31)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "''"),
        ("ttft=1", "tpot missing"),
        ("ttft=1,tpot=0.1,share=2", "at most 1"),
        ("ttft=1,tpot=0.1,share=0", "above 0"),
        ("ttft=1,tpot=0.1,share=most", "no number"),
        ("ttft=1,tpot=0", "above 0"),
        ("ttft=1,ttft=2,tpot=0.1", "twice"),
        ("ttft=-1,tpot=0.1", "SECONDS"),
        ("ttft=1*images,tpot=0.1", "SECONDS"),
        ("ttft=1.2.3,tpot=0.1", "SECONDS"),
        ("e2e=1,tpot=0.1", "'e2e=1'"),
    ],
)
def test_slo_that_cannot_be_used(text: str, told: str) -> None:
    with pytest.raises(BenchError, match="cannot be used") as caught:
        parse_slo(text)
    assert told in str(caught.value) and DEFAULT in str(caught.value)


class Knee:
    """A system that meets the SLO up to a rate, and not above it."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.tried: list[float] = []

    async def __call__(self, rate: float) -> Probe:
        self.tried.append(rate)
        return Probe(rate=rate, passed=rate <= self.rate, sent=100, kept=100)


@pytest.mark.parametrize("knee", [0.3, 1.0, 1.01, 7.7, 100.0, 3333.0])
async def test_search_finds_the_knee(knee: float) -> None:
    system = Knee(knee)
    found = await find_goodput(system, begin=1.0, precision=0.05)
    assert found.rate <= knee < found.failed_at <= found.rate * 1.05
    assert [probe.rate for probe in found.probes] == system.tried
    assert len(system.tried) == len(set(system.tried)), "no rate is tried twice"
    assert len(system.tried) < 20


async def test_search_ends_at_the_most() -> None:
    found = await find_goodput(Knee(1e9), begin=1.0, most=100.0)
    assert (found.rate, found.failed_at) == (100.0, 0.0)


async def test_search_says_that_no_rate_will_do() -> None:
    system = Knee(0.001)
    with pytest.raises(NoRateError, match=r"no rate meets the SLO: even at 0\.0625") as caught:
        await find_goodput(system, begin=1.0)
    assert system.tried == [1.0, 0.5, 0.25, 0.125, 0.0625]
    assert len(caught.value.probes) == 5


def outcome(number: int, **fields: object) -> Outcome:
    values = {"ttft_s": 0.5, "tpot_s": 0.01, "e2e_s": 1.0, "output_tokens": 10, "usage": True}
    return Outcome(number=number, kind=0, images=1, **{**values, **fields})  # type: ignore[arg-type]


def test_failures_and_slow_ones_are_not_good() -> None:
    slo = parse_slo("ttft=1,tpot=0.1,share=0.5")
    outcomes = [
        outcome(0),
        outcome(1, ttft_s=1.5),
        outcome(2, tpot_s=0.2),
        outcome(3, failure="503 queue_full"),
        outcome(4, failure="503 queue_full"),
        outcome(5, failure="cut_off"),
        outcome(6, tpot_s=-1.0, output_tokens=1, usage=False),
    ]
    assert [keeps(one, slo) for one in outcomes] == [True, *[False] * 5, True]
    summary = summarise(outcomes, lasted_s=2.0, distinct_images=3, slo=slo)
    assert summary.failures == {"503 queue_full": 2, "cut_off": 1}
    assert (summary.sent, summary.answered, summary.requests_per_s) == (7, 4, 2.0)
    assert summary.output_tokens_per_s == 31 / 2
    assert summary.slo_share == 2 / 7
    assert summary.ttft.count == 4 and summary.ttft.max == 1.5
    assert summary.tpot.count == 3 and summary.without_usage == 1


def test_quantiles_are_values_that_were_there() -> None:
    found = quantiles(range(100, 0, -1))
    assert (found.p50, found.p90, found.p99, found.max, found.mean) == (50, 90, 99, 100, 50.5)
    assert quantiles([3.0]).p50 == quantiles([3.0]).p99 == 3.0
    assert quantiles([]).count == 0
