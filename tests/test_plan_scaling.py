"""The cluster on paper: what grows how, and where one of each part is full."""

from __future__ import annotations

import pytest

from epd_bench.builtin import RandomMm, find_workload
from epd_common.bus.puller import LOADED_WAIT_S
from epd_common.settings import CommonSettings
from epd_plan.costs import Costs
from epd_plan.needs import Needs, needs
from epd_plan.scaling import BUSY, Part, Units, cluster_of, full_at, needed, parts
from epd_sim.profiles import profile_named

H100 = profile_named("qwen2.5-vl-7b-h100")
AZURE = needs(find_workload("azure", RandomMm()), 1, H100, Costs())
TEXT = needs(find_workload("text", RandomMm()), 1, H100, Costs())


def at(workers: int, found: Needs = AZURE, units: Units = Units()) -> dict[str, Part]:  # noqa: B008
    cluster = cluster_of(workers // 5, workers - workers // 5, found)
    return {part.name: part for part in parts(cluster, found, units, through_valkey=True)}


def test_a_cluster_is_looked_at_where_its_busier_stage_is_busy() -> None:
    cluster = cluster_of(1000, 4000, AZURE)
    stages = (cluster.rate * AZURE.encode_s / 1000, cluster.rate * AZURE.engine_s / 4000)
    assert max(stages) == pytest.approx(BUSY)
    assert cluster_of(1, 8, TEXT).rate == pytest.approx(BUSY * 8 / TEXT.engine_s)


def test_most_parts_grow_with_the_cluster_and_heartbeats_with_its_square() -> None:
    small, large = at(500), at(5000)
    for name, part in large.items():
        grown = part.load / small[name].load
        if name == "each PD worker: heartbeats":
            assert 10 < grown < 100, "of each record some time goes by the number of workers"
            continue
        squares = name == "NATS: heartbeats"
        assert grown == pytest.approx(100 if squares else 10, rel=0.05), name


def test_a_part_is_full_where_its_load_is_above_1() -> None:
    for name in at(10):
        workers = full_at(name, lambda count: list(at(count).values()))
        assert at(workers)[name].load > 1 >= at(workers - 1)[name].load, name
    assert (
        full_at("Valkey: media", lambda count: list(at(count, TEXT).values()), 1 << 16) == 1 << 16
    )


def test_text_needs_no_encode_jobs_and_moves_nothing() -> None:
    found = at(1000, TEXT)
    for name in ("NATS: stream of encode jobs", "Valkey: media", "Valkey: embeddings"):
        assert found[name].load == 0


def test_what_is_needed_is_not_quite_full() -> None:
    assert [needed(Part("", load, "", "")) for load in (0.0, 0.7, 0.71, 7.0)] == [1, 1, 2, 10]


def test_units_are_those_of_the_services() -> None:
    units = Units()
    assert units.heartbeat_s == CommonSettings.model_fields["heartbeat_s"].default
    assert units.pull_renewed_s == LOADED_WAIT_S
