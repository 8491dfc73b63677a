"""The web page in a headless Chromium, on a real gateway with engines that need no model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import (
    Browser,
    Locator,
    Page,
    Request,
    async_playwright,
    expect,
)

from epd_common.api_keys import ApiKey, hash_key
from epd_sim.answers import expected_answer
from fake_engine import answer_text
from service_stack import BOUND_S, ServiceStack, bare_stack, eventually, picture, service_stack
from sim_stack import SimStack, sim_stack

pytestmark = [pytest.mark.slow, pytest.mark.extra]

ROOT = Path(__file__).parents[1]
BROWSER_WITHIN_S = 600
"""A browser may have to be installed."""

PHONE = {"width": 360, "height": 740}
DESK = {"width": 1280, "height": 900}
HOSTILE = "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script>"
KEY = "a-right-key"
TIMES = "\N{MULTIPLICATION SIGN}"


def browser_program() -> str:
    command = [ROOT / "scripts" / "browser.sh"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BROWSER_WITHIN_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    program = await asyncio.to_thread(browser_program)
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(executable_path=program)
        yield launched
        await launched.close()


@pytest.fixture(scope="module")
async def sim(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SimStack]:
    """Simulated engines, each of whose steps takes a little time."""
    async with sim_stack(nats_url, redis_url, tmp_path_factory.mktemp("page-sim")) as running:
        running.encoder_time.real_s = running.pd_time.real_s = 0.01
        await running.start(encoders=2, pds=2)
        yield running


@pytest.fixture(scope="module")
async def echo(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ServiceStack]:
    """Engines that answer with what they were asked."""
    folder = tmp_path_factory.mktemp("page-echo")
    async with service_stack(nats_url, redis_url, folder) as running:
        yield running


class Seen:
    """A page, and what it asked for and complained of."""

    def __init__(self, page: Page, base: str) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._base = base
        page.on("request", self._asked)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda line: self._said(line.type, line.text))

    def _asked(self, request: Request) -> None:
        self.requests.append(request.url)

    def _said(self, kind: str, text: str) -> None:
        # The browser's own word on an answer that is an error, which the page shows in its way.
        if kind in ("error", "warning") and not text.startswith("Failed to load resource"):
            self.complaints.append(text)

    def asked(self, path: str) -> int:
        return sum(url.startswith(f"{self._base}/{path}") for url in self.requests)

    def check(self) -> None:
        assert not self.complaints
        assert all(url.startswith((f"{self._base}/", "blob:")) for url in self.requests)


@contextlib.asynccontextmanager
async def opened(
    browser: Browser, stack: ServiceStack, path: str = "/ui", **options: Any
) -> AsyncIterator[Seen]:
    """The page in a context of its own, which is looked through at its end."""
    context = await browser.new_context(**{"viewport": DESK, **options})
    context.set_default_timeout(BOUND_S * 1000)
    try:
        page = await context.new_page()
        seen = Seen(page, stack.gateway_url)
        await page.goto(f"{stack.gateway_url}{path}")
        yield seen
        seen.check()
    finally:
        await context.close()


@pytest.fixture
async def sim_page(browser: Browser, sim: SimStack) -> AsyncIterator[Seen]:
    async with opened(browser, sim) as seen:
        yield seen


@pytest.fixture
async def echo_page(browser: Browser, echo: ServiceStack) -> AsyncIterator[Seen]:
    async with opened(browser, echo) as seen:
        yield seen


def upload(name: str, data: bytes) -> Any:
    return {"name": name, "mimeType": "image/png", "buffer": data}


async def ask(page: Page, stack: ServiceStack, question: str, *files: Any) -> None:
    await page.get_by_label("Model").select_option(stack.model)
    if files:
        await page.get_by_label("Choose pictures").set_input_files(list(files))
    await page.get_by_label("Question").fill(question)
    await page.get_by_role("button", name="Ask").click()


async def choose_unknown(page: Page, name: str) -> None:
    """As if the model that is chosen had gone since."""
    model = page.get_by_label("Model")
    await model.evaluate("(chooser, name) => (chooser.selectedOptions[0].value = name)", name)


def answer_of(page: Page) -> Locator:
    return page.locator("#answer")


async def expect_answer(page: Page, text: str) -> None:
    await expect(answer_of(page)).to_have_text(text)
    await expect(page.locator("#answer-note")).to_contain_text("Answered in")


def rows(inside: Locator) -> Locator:
    return inside.locator(".rows > li")


async def sideways(page: Page) -> int:
    """So many pixels the page is wider than its window."""
    found: int = await page.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    return found


# -- questions and answers --------------------------------------------------------------------------


async def test_a_question_about_pictures_is_answered_and_its_time_shown(
    sim: SimStack, sim_page: Seen
) -> None:
    page = sim_page.page
    red, blue = picture((64, 48)), picture((32, 32))
    await ask(page, sim, "What is here?", upload("red.png", red), upload("blue.png", blue))
    body = sim.body("What is here?", red, blue, max_tokens=256, temperature=0)
    await expect_answer(page, expected_answer(body, [red, blue]))
    await expect(page.locator("#answer-note")).to_contain_text("tokens in")

    own = page.locator("#own-waterfall")
    await expect(rows(own)).to_have_count(4)  # the gateway, two images, the PD worker
    await expect(rows(own).nth(1)).to_contain_text(f"64{TIMES}48, encoded")
    for row in (1, 2):
        await expect(rows(own).nth(row).locator("[data-stage=encode]")).to_have_count(1)
    for stage in ("prefill", "decode"):
        await expect(rows(own).nth(3).locator(f"[data-stage={stage}]")).to_have_count(1)
    await expect(own.locator(".flag[data-kind=first]")).to_contain_text("first token")
    widths = await own.locator(".track .bar").evaluate_all(
        "bars => bars.map(bar => bar.getBoundingClientRect().width)"
    )
    assert len(widths) > 6 and all(width >= 2 for width in widths)

    await own.get_by_role("button", name="Receipt").click()
    detail = page.locator("#detail")
    await expect(detail).to_be_focused()
    await expect(detail).to_contain_text("2 encoded")
    served = detail.locator("dt:text-is('PD worker') + dd")
    assert (await served.inner_text()).split()[0] in [worker.id for worker in sim.pds]
    encoders = await detail.locator(".items tbody td:nth-child(3)").all_inner_texts()
    assert set(encoders) <= {worker.id for worker in sim.encoders}

    # In another order, which is done with the keyboard; now both are in a store.
    for way, place in (("Later", 2), ("Earlier", 1), ("Later", 2)):
        button = page.get_by_role("button", name=f"{way}: red.png")
        await button.focus()
        await page.keyboard.press("Enter")
        moved = page.locator("#pictures-status")
        await expect(moved).to_have_text(f"red.png is now picture {place} of 2")
        await expect(button).to_be_focused()
    await page.get_by_role("button", name="Ask").click()
    await expect_answer(page, expected_answer(body_in(body, 1, 0, 2), [blue, red]))
    await expect(rows(own).nth(1)).to_contain_text(f"32{TIMES}32, reused")
    await expect(own.locator(".track .found")).to_have_count(2)


def body_in(body: dict[str, Any], *order: int) -> dict[str, Any]:
    """The body with the parts of its message in another order."""
    (message,) = body["messages"]
    return {**body, "messages": [{**message, "content": [message["content"][n] for n in order]}]}


async def test_pictures_are_dropped_pasted_and_removed(sim: SimStack, sim_page: Seen) -> None:
    page = sim_page.page
    data = picture()
    give = """(target, [event, names, bytes]) => {
        const files = new DataTransfer();
        for (const name of names) {
            const type = name.endsWith(".png") ? "image/png" : "text/plain";
            files.items.add(new File([new Uint8Array(bytes)], name, { type }));
        }
        const made = event === "paste"
            ? new ClipboardEvent("paste", { clipboardData: files, bubbles: true, cancelable: true })
            : new DragEvent(event, { dataTransfer: files, bubbles: true, cancelable: true });
        target.dispatchEvent(made);
    }"""
    await page.locator("#drop").evaluate(give, ["drop", ["a.png", "notes.txt"], list(data)])
    refused = page.locator("#pictures-refused")
    await expect(refused).to_have_text("No picture, so left out: notes.txt")
    await page.locator("#question").evaluate(give, ["paste", ["b.png"], list(data)])
    names = page.locator(".pictures .name")
    await expect(names).to_have_text(["a.png", "b.png"])
    await page.get_by_role("button", name="Remove: b.png").press("Enter")
    await expect(names).to_have_text(["a.png"])
    await expect(page.get_by_role("button", name="Remove: a.png")).to_be_focused()
    await ask(page, sim, "dropped")
    body = sim.body("dropped", data, max_tokens=256, temperature=0)
    await expect_answer(page, expected_answer(body, [data]))


async def test_all_of_it_by_keyboard(sim: SimStack, sim_page: Seen) -> None:
    page = sim_page.page
    await expect(page.get_by_label("Model")).to_have_value(sim.model)
    await page.keyboard.press("Tab")
    await expect(page.locator(".skip")).to_be_focused()
    await page.keyboard.press("Enter")
    for _ in range(4):
        await page.keyboard.press("Tab")
        if await page.evaluate("document.activeElement.id") == "question":
            break
    await page.keyboard.type("by keyboard")
    await page.keyboard.press("Control+Enter")
    body = sim.body("by keyboard", max_tokens=256, temperature=0)
    await expect_answer(page, expected_answer(body))
    first = page.locator("#requests button").first
    await first.focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("#detail")).to_be_focused()
    outlined = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outlined == "solid"
    await page.get_by_role("button", name="Close").press("Enter")
    await expect(first).to_be_focused()


async def test_an_answer_is_stopped(echo: ServiceStack, echo_page: Seen) -> None:
    page, engine = echo_page.page, echo.pds[0].engine
    engine.gate.clear()
    try:
        await ask(page, echo, "never said")
        await eventually(lambda: bool(engine.running), "the engine has it")
        await page.get_by_role("button", name="Stop").click()
        await expect(page.locator("#answer-note")).to_contain_text("Stopped")
        await eventually(lambda: not engine.running, "the engine was told")
    finally:
        engine.gate.set()
    await expect(page.locator("#requests tr").first).to_contain_text("cancelled")
    await expect(page.locator("#failure")).to_be_empty()
    await ask(page, echo, "said")
    await expect_answer(page, "said")


# -- errors -----------------------------------------------------------------------------------------


async def expect_failure(page: Page, *texts: str) -> None:
    alert = page.locator("#failure")
    for text in texts:
        await expect(alert).to_contain_text(text)
    await expect(alert).to_contain_text("What to do")
    await expect(alert).to_have_attribute("role", "alert")


async def test_a_model_that_is_not_there(echo: ServiceStack, echo_page: Seen) -> None:
    page = echo_page.page
    await page.get_by_label("Model").select_option(echo.model)
    await choose_unknown(page, "gone")
    await page.get_by_label("Question").fill("x")
    await page.get_by_role("button", name="Ask").click()
    await expect_failure(page, "404 model_not_found", "gone", "Choose another model")
    await expect(page.locator("#requests tr").first).to_contain_text("refused 404")


async def test_a_picture_that_is_cut(echo: ServiceStack, echo_page: Seen) -> None:
    await ask(echo_page.page, echo, "x", upload("cut.png", picture()[:40]))
    await expect_failure(echo_page.page, "400 invalid_image", "messages[0].content[0]")


async def test_an_error_in_the_middle_of_an_answer(
    echo: ServiceStack, echo_page: Seen, nats_url: str, redis_url: str
) -> None:
    """It comes as an event of a stream whose status was 200."""
    engine = echo.pds[0].engine
    engine.gate.clear()
    await ask(echo_page.page, echo, "x")
    await eventually(lambda: bool(engine.running), "the engine has it")
    (request,) = engine.running
    ended = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "epd_cli", "cancel", request),
        *("--nats", nats_url, "--redis", redis_url),
    )
    assert await ended.wait() == 0
    engine.gate.set()
    await expect_failure(echo_page.page, "cancelled", request)


async def test_keys_are_asked_for_and_stay_in_the_tab(
    browser: Browser, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    line = ApiKey(hash=hash_key(KEY.encode()), tenant="a").line()
    async with bare_stack(nats_url, redis_url, tmp_path) as stack:
        await stack.add_pd()
        await stack.add_gateway(api_keys=line)
        stack.http.headers["authorization"] = f"Bearer {KEY}"
        await stack.ready()
        async with opened(browser, stack) as seen:
            page = seen.page
            notice = page.locator("#notice")
            await expect(notice).to_contain_text("401 invalid_api_key")
            await expect(notice).to_contain_text("Put your API key")
            asked = seen.asked("ui/api/live")
            await page.wait_for_timeout(1500)
            assert seen.asked("ui/api/live") == asked, "without a key asking again is no use"
            field = page.get_by_label("API key")
            await field.fill("wrong")
            await page.get_by_label("Question").fill("x")
            await page.get_by_role("button", name="Ask").click()
            await expect_failure(page, "401 invalid_api_key", "Put your API key")
            await field.fill(KEY)
            await field.press("Enter")
            await expect(notice).to_be_empty()
            await ask(page, stack, "with a key")
            await expect_answer(page, "with a key")
            await expect(page.locator("#requests tr")).to_have_count(1)
            kept = await page.evaluate(
                "[Object.values(sessionStorage), localStorage.length, document.cookie]"
            )
            assert kept == [[KEY], 0, ""]
            for kind in ("curl", "Python", "NATS"):
                await page.get_by_role("button", name=f"Copy as {kind}").click()
                await expect(page.locator("#copy-text")).not_to_contain_text(KEY)
            await page.reload()
            await expect(field).to_have_value(KEY)
            await expect(page.locator("#requests tr")).to_have_count(1)
            other = await page.context.new_page()
            await other.goto(page.url)
            await expect(other.get_by_label("API key")).to_have_value("")


async def test_of_several_tenants_none_sees_the_system(
    browser: Browser, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    lines = [ApiKey(hash=hash_key(f"{KEY}-{name}".encode()), tenant=name).line() for name in "ab"]
    async with bare_stack(nats_url, redis_url, tmp_path) as stack:
        await stack.add_pd()
        await stack.add_gateway(api_keys=";".join(lines))
        stack.http.headers["authorization"] = f"Bearer {KEY}-b"
        await stack.ready()
        await stack.ask("of b")
        async with opened(browser, stack) as seen:
            page = seen.page
            await page.get_by_label("API key").fill(f"{KEY}-a")
            await page.get_by_label("API key").press("Enter")
            await expect(page.get_by_text("Several tenants share this system")).to_be_visible()
            await expect(page.locator("#workers tr, #tiles li")).to_have_count(0)
            await ask(page, stack, "of a")
            await expect_answer(page, "of a")
            await expect(page.locator("#requests tr")).to_have_count(1)


async def test_markup_from_outside_stays_text(echo: ServiceStack, echo_page: Seen) -> None:
    """In an answer, in the name of a file, in an error."""
    page = echo_page.page
    data = picture()
    await ask(page, echo, HOSTILE, upload(f"{HOSTILE}.png".replace("/", "\\"), data))
    await expect_answer(page, answer_text(HOSTILE, data))
    assert await page.locator("#answer *").count() == 0
    await expect(page.locator(".pictures .name")).to_contain_text("<img src=x onerror=")
    await choose_unknown(page, HOSTILE)
    await page.get_by_role("button", name="Ask").click()
    await expect_failure(page, "404 model_not_found", "<img src=x onerror=")
    await expect(page.locator("#requests tr").first).to_contain_text("refused")
    await page.locator("#requests button").first.click()
    await expect(page.locator("#detail")).to_contain_text("<img src=x onerror=")
    assert await page.locator("img:not(.pictures img), script:not([src])").count() == 0
    assert await page.title() == "epdflow"


# -- the live view ----------------------------------------------------------------------------------


async def test_workers_queues_and_stores(sim: SimStack, sim_page: Seen) -> None:
    page = sim_page.page
    for worker in (*sim.encoders, *sim.pds):
        row = page.locator("#workers tr").filter(has_text=worker.id)
        await expect(row).to_contain_text("ready")
        await expect(row).to_contain_text("0 of")
    await expect(page.locator("#tiles")).to_contain_text("Encode queue")
    await expect(page.locator("#tiles")).to_contain_text("Generate queue")
    await expect(page.locator("#tiles")).to_contain_text("Arena of")
    await expect(page.locator("#live-state")).to_have_text("live")


async def test_an_open_request_is_seen(echo: ServiceStack, echo_page: Seen) -> None:
    page, engine = echo_page.page, echo.pds[0].engine
    engine.gate.clear()
    try:
        asking = asyncio.create_task(echo.ask("held"))
        row = page.locator("#requests tr").first
        await expect(row).to_contain_text("open")
        await expect(page.locator("#workers tr").filter(has_text=echo.pds[0].id)).to_contain_text(
            "1 of"
        )
        await row.click()
        drawn = rows(page.locator("#detail")).last.locator("[data-stage=unknown]")
        await expect(drawn).to_be_visible()
    finally:
        engine.gate.set()
    await asking
    await expect(row).to_contain_text("answered")
    await expect(page.locator("#detail .chip")).to_have_text("answered")


async def test_a_pause_and_a_hidden_tab_ask_nothing(sim_page: Seen) -> None:
    page = sim_page.page
    await expect(page.locator("#live-state")).to_have_text("live")
    button = page.get_by_role("button", name="Pause")
    await button.click()
    await expect(page.locator("#live-state")).to_have_text("paused")
    await asks_nothing(sim_page)
    await button.click()
    await expect(page.locator("#live-state")).to_have_text("live")
    hide = """hidden => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    await page.evaluate(hide, True)
    await asks_nothing(sim_page)
    before = sim_page.asked("ui/api/live")
    await page.evaluate(hide, False)
    await eventually(lambda: sim_page.asked("ui/api/live") > before + 1, "it asks again")


async def asks_nothing(seen: Seen) -> None:
    before = seen.asked("ui/api/live")
    await seen.page.wait_for_timeout(1500)
    assert seen.asked("ui/api/live") == before


async def test_a_gateway_that_goes_and_comes_back(
    browser: Browser, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with service_stack(nats_url, redis_url, tmp_path) as stack:
        async with opened(browser, stack) as seen:
            page = seen.page
            await ask(page, stack, "before")
            await expect_answer(page, "before")
            port = int(stack.gateway_url.rpartition(":")[2])
            await stack.gateway.stop()
            await expect(page.locator("#notice")).to_contain_text("The gateway does not answer")
            await expect(page.locator("#live-state")).to_have_text("no answer")
            await expect(page.locator("#workers tr")).not_to_have_count(0)
            await page.get_by_role("button", name="Ask").click()
            await expect_failure(page, "unreachable")
            await stack.add_gateway(port=port)
            await expect(page.locator("#live-state")).to_have_text("live")
            await expect(page.locator("#notice")).to_be_empty()
            await ask(page, stack, "after")
            await expect_answer(page, "after")


# -- timelines ------------------------------------------------------------------------------------


def receipt(*items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A receipt of a request that was answered, but for what is given."""
    pd = {"worker": "pd-1", "node": "n", "attempt": 1, "pulled_s": 0.3, "prepared_s": 0.4}
    pd |= {"entered_s": 0.6, "first_s": 0.8, "ended_s": 0.9}
    times = {"ingested_s": 0.1, "published_s": 0.2, "first_s": 0.85, "ended_s": 1.0}
    return {"state": "answered", "error": None, "items": list(items), "pd": pd, **times, **fields}


def item(**fields: Any) -> dict[str, Any]:
    durations = {"queued_s": 0.05, "media_s": 0.05, "encode_s": 0.1, "publish_s": 0.05}
    rest = {
        "modality": "image",
        "origin": "encoded",
        "rescue": "",
        "ready_s": 0.5,
        "pinned_s": 0.55,
    }
    return {**durations, **rest, **fields}


NO_DURATIONS = dict.fromkeys(("queued_s", "media_s", "encode_s", "publish_s"))
NOT_READY = {**NO_DURATIONS, "ready_s": None, "pinned_s": None}
WHOLE = ["service 0 0.1", "service 0.1 0.2"]
OF_PD = ["queue 0.2 0.3", "service 0.3 0.4", "wait 0.4 0.6", "prefill 0.6 0.8", "decode 0.8 0.9"]
HELD = ["transfer 0.5 0.55", "pinned 0.55 0.9"]
ENCODED = ["queue 0.25 0.3", "fetch 0.3 0.35", "encode 0.35 0.45", "store 0.45 0.5", *HELD]


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        (receipt(), [WHOLE, OF_PD]),
        (receipt(item()), [WHOLE, ["queue 0.2 0.25", *ENCODED], OF_PD]),
        (receipt(item(rescue="ordered")), [WHOLE, ["unknown 0.2 0.25", *ENCODED], OF_PD]),
        (receipt(item(origin="shared")), [WHOLE, ENCODED, OF_PD]),
        (  # its encode began before the request came
            receipt(item(origin="shared", encode_s=0.6)),
            [WHOLE, ["encode 0 0.45", "store 0.45 0.5", *HELD], OF_PD],
        ),
        (receipt(item(origin="shared", **NO_DURATIONS)), [WHOLE, ["queue 0.2 0.5", *HELD], OF_PD]),
        (receipt(item(origin="reused", **NO_DURATIONS)), [WHOLE, ["found 0.5", *HELD], OF_PD]),
        (
            receipt(item(**NOT_READY), state="open", pd=None, first_s=None, ended_s=None),
            [WHOLE, ["unknown 0.2 2"], ["unknown 0.2 2"]],
        ),
        (
            receipt(state="open", pd=None, ended_s=None),
            [WHOLE, ["unknown 0.2 0.85", "decode 0.85 2"]],
        ),
        (
            receipt(state="refused", pd=None, published_s=None, first_s=None),
            [["service 0 0.1", "service 0.1 1"]],
        ),
        (
            receipt(state="refused", pd=None, ingested_s=None, published_s=None, first_s=None),
            [["service 0 1"]],
        ),
        (
            receipt(pd={"worker": "w", "pulled_s": 0.3, "prepared_s": None, "entered_s": None}),
            [WHOLE, ["queue 0.2 0.3", "service 0.3 1"]],
        ),
    ],
)
async def test_a_receipt_becomes_rows(sim_page: Seen, given: Any, rows: list[list[str]]) -> None:
    read = "receipt => import('/ui/timeline.js').then(module => module.timelineOf(receipt, 2))"
    timeline = await sim_page.page.evaluate(read, given)
    drawn = []
    for row in timeline["rows"]:
        bars = [f"{bar['stage']} {bar['from']:.3g} {bar['to']:.3g}" for bar in row["bars"]]
        found = [] if row["found"] is None else [f"found {row['found']:g}"]
        drawn.append(found + bars)
    assert drawn == rows


# -- the same request from elsewhere ----------------------------------------------------------------


async def test_what_is_copied_gives_the_same_answer(
    browser: Browser, sim: SimStack, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    data = {'it\'s $(a) "b".png': picture(), "-x.png": picture()}
    for name, content in data.items():
        (tmp_path / name).write_bytes(content)
    question = "say 'it' $HOME\n\"twice\" `ls` \u2028 \\"
    permissions = ["clipboard-read", "clipboard-write"]
    async with opened(browser, sim, permissions=permissions) as seen:
        page = seen.page
        await page.get_by_label("Max tokens").fill("7")
        await page.get_by_label("Temperature").fill("0.5")
        files = [upload(name, content) for name, content in data.items()]
        await ask(page, sim, question, *files)
        body = sim.body(question, *data.values(), max_tokens=7, temperature=0.5)
        answer = expected_answer(body, list(data.values()))
        await expect_answer(page, answer)

        curl = await copied(page, "curl")
        streamed = await output(["sh", "-eu", "-c", curl], tmp_path)
        assert "".join(contents(streamed)) == answer

        python = await copied(page, "Python")
        assert (
            await output([sys.executable, "-W", "error", "-c", python], tmp_path)
        ).strip() == answer

        nats = await copied(page, "NATS")
        assert nats.startswith("epd submit ")
        words = [sys.executable, "-m", "epd_cli"], ["--nats", nats_url, "--redis", redis_url]
        program = f'epd() {{ {shlex.join(words[0])} "$@" {shlex.join(words[1])}; }}\n{nats}'
        assert (await output(["sh", "-eu", "-c", program], tmp_path)).strip() == answer


async def copied(page: Page, kind: str) -> str:
    await page.get_by_role("button", name=f"Copy as {kind}").click()
    await expect(page.locator("#copy-note")).to_contain_text("Copied")
    text: str = await page.evaluate("navigator.clipboard.readText()")
    assert text.strip() == (await page.locator("#copy-text").inner_text()).strip()
    return text


async def output(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, errors.decode()
    return out.decode()


def contents(stream: str) -> list[str]:
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    return [c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"]]


# -- how it looks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_fits_and_is_accessible(browser: Browser, sim: SimStack, scheme: str) -> None:
    """On a phone and a desk, with everything open that can be opened."""
    for viewport in (PHONE, DESK):
        async with opened(browser, sim, viewport=viewport, color_scheme=scheme) as seen:
            page = seen.page
            assert await sideways(page) <= 0
            name = f"{'a-very-long-name-without-a-space' * 4}.png"
            await ask(page, sim, "y" * 400, upload(name, picture((64, 64))), upload("b", picture()))
            await expect(page.locator("#own-waterfall .chart")).to_be_visible()
            await page.get_by_role("button", name="Copy as curl").click()
            await page.locator("#own-waterfall").get_by_role("button", name="Receipt").click()
            await page.locator("#detail summary").click()
            await choose_unknown(page, "gone")
            await page.get_by_role("button", name="Ask").click()
            await expect(page.locator("#failure .notice")).to_be_visible()
            assert await sideways(page) <= 0
            found = await Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
