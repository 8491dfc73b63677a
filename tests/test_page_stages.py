"""The web page in a headless Chromium, where one worker prefills and another one answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, expect

from epd_sim.answers import expected_answer
from roles_stack import roles_stack
from service_stack import picture
from sim_stack import SimStack
from test_page import PHONE, Seen, ask, browser, expect_answer, opened, rows, sideways, upload

__all__ = ["browser"]

pytestmark = [pytest.mark.slow, pytest.mark.extra]


@pytest.fixture(scope="module")
async def roles(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SimStack]:
    """Simulated engines, each of whose steps takes a little time."""
    async with roles_stack(nats_url, redis_url, tmp_path_factory.mktemp("page-roles")) as running:
        running.encoder_time.real_s = running.pd_time.real_s = 0.02
        yield running


@pytest.fixture
async def page_of_roles(browser: Browser, roles: SimStack) -> AsyncIterator[Seen]:
    async with opened(browser, roles) as seen:
        yield seen


async def test_a_prompt_that_was_handed_over_is_shown_with_both_workers(
    roles: SimStack, page_of_roles: Seen
) -> None:
    page = page_of_roles.page
    data = picture((64, 48))
    await ask(page, roles, "What is here?", upload("red.png", data))
    body = roles.body("What is here?", data, max_tokens=256, temperature=0)
    await expect_answer(page, expected_answer(body, [data]))

    own = page.locator("#own-waterfall")
    titles = own.locator(".rows .row-title b")
    await expect(titles).to_have_text(["Gateway", "Image 1", "Prefill worker", "Decode worker"])
    prefill, decode = rows(own).nth(2), rows(own).nth(3)
    for row, stages in ((prefill, ("queue", "prefill")), (decode, ("handover", "load", "decode"))):
        for stage in stages:
            await expect(row.locator(f".bar[data-stage={stage}]")).to_have_count(1)
    await expect(prefill.locator("[data-stage=decode]")).to_have_count(0)
    await expect(decode.locator("[data-stage=prefill]")).to_have_count(0)
    for text in ("handed over", "keys and values loaded"):
        await expect(own.locator(".legend")).to_contain_text(text)
    shapes = "bars => bars.map(bar => bar.getBoundingClientRect()).map(({ left, right }) => [left, right])"
    drawn = await own.locator(".rows > li:nth-child(n + 3) .bar").evaluate_all(shapes)
    assert all(left < right for left, right in drawn)
    assert [left for left, _ in drawn] == sorted(left for left, _ in drawn), "one after another"

    await own.get_by_role("button", name="Receipt").click()
    detail = page.locator("#detail")
    told = {
        "Prefill worker": roles.pds[0].id,
        "Decode worker": roles.pds[1].id,
        "Why prefilled there": "any worker",
        "Attempt": "prefill: the first; decode: the first",
        "Loaded": "tokens of the prompt",
    }
    for name, text in told.items():
        await expect(detail.locator(f"dt:text-is('{name}') + dd")).to_contain_text(text)
    await expect(detail.locator(".items tbody td").nth(1)).to_have_text(roles.encoders[0].id)
    summary = page.locator("#requests tr").first.locator(".summary")
    for stage in ("prefill", "handover", "load", "decode"):
        await expect(summary.locator(f"[data-stage={stage}]")).to_have_count(1)


async def test_the_list_of_workers_says_what_each_does(
    roles: SimStack, page_of_roles: Seen
) -> None:
    table = page_of_roles.page.locator("#workers tr")
    for worker, role in zip(roles.pds, ("prefill", "decode"), strict=True):
        row = table.filter(has_text=worker.id)
        await expect(row.locator("th .hint")).to_contain_text(f"{role} on ")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_fits_and_is_accessible(browser: Browser, roles: SimStack, scheme: Any) -> None:
    async with opened(browser, roles, viewport=PHONE, color_scheme=scheme) as seen:
        page = seen.page
        await ask(page, roles, "x", upload("b", picture()))
        own = page.locator("#own-waterfall")
        await expect(own.locator(".chart")).to_be_visible()
        await own.get_by_role("button", name="Receipt").click()
        await expect(page.locator("#detail")).to_be_focused()
        assert await sideways(page) <= 0
        found = await Axe().run(page)
        assert found.violations_count == 0, found.generate_report()


HANDED_OVER: dict[str, Any] = {
    "state": "answered",
    "ingested_s": 0.1,
    "published_s": 0.2,
    "first_s": 1.5,
    "ended_s": 2,
    "error": None,
    "items": [{"modality": "image", "origin": "reused", "ready_s": 0.3, "pinned_s": 0.4}],
    "prefill": {
        "worker": "p",
        "pulled_s": 0.3,
        "prepared_s": 0.35,
        "entered_s": 0.4,
        "first_s": 0.9,
        "ended_s": 1.0,
    },
    "pd": {
        "worker": "d",
        "pulled_s": 1.1,
        "prepared_s": 1.2,
        "entered_s": 1.2,
        "first_s": 1.4,
        "ended_s": 1.9,
        "loaded_tokens": 9,
    },
}
PREFILL = ["queue 0.2 0.3", "service 0.3 0.35", "wait 0.35 0.4", "prefill 0.4 0.9"]


@pytest.mark.parametrize(
    ("of_pd", "pinned_s", "item", "decode"),
    [
        (
            {},
            0.4,
            ["transfer 0.3 0.4", "pinned 0.4 1"],
            ["handover 0.9 1.1", "service 1.1 1.2", "load 1.2 1.4", "decode 1.4 1.9"],
        ),
        (
            {"loaded_tokens": 0, "entered_s": 1.3},
            1.25,
            ["transfer 0.3 1.25", "pinned 1.25 1.9"],
            [
                "handover 0.9 1.1",
                "service 1.1 1.2",
                "wait 1.2 1.3",
                "prefill 1.3 1.4",
                "decode 1.4 1.9",
            ],
        ),
    ],
)
async def test_a_receipt_with_a_prefill_becomes_rows(
    page_of_roles: Seen,
    of_pd: dict[str, Any],
    pinned_s: float,
    item: list[str],
    decode: list[str],
) -> None:
    items = [HANDED_OVER["items"][0] | {"pinned_s": pinned_s}]
    given = HANDED_OVER | {"pd": HANDED_OVER["pd"] | of_pd, "items": items}
    read = "receipt => import('/ui/timeline.js').then(module => module.timelineOf(receipt, 2))"
    timeline = await page_of_roles.page.evaluate(read, given)
    drawn = [
        [f"{bar['stage']} {bar['from']:.3g} {bar['to']:.3g}" for bar in row["bars"]]
        for row in timeline["rows"]
    ]
    assert drawn[1:] == [item, PREFILL, decode]
