"""``bench.compare``'s system in which prefill and decode are on workers of their own."""

from __future__ import annotations

import sys

import httpx
import pytest

from bench.baseline.systems import SYSTEMS, Shape
from bench.compare import main as compare_main
from epd_sim.answers import expected_answer
from service_stack import CHAT, picture, request_body, text_of


@pytest.mark.slow
async def test_its_prompts_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPD_SPLIT_TOKENS", "0")
    shape = Shape(encoders=1, profile="instant", prefill_pds=1, decode_pds=1)
    async with (
        SYSTEMS["epd"](shape) as system,
        httpx.AsyncClient(base_url=system.url, timeout=30) as client,
    ):
        for number in range(3):
            data = picture()
            body = request_body("sim", f"number {number}", data)
            assert text_of(await client.post(CHAT, json=body)) == expected_answer(body, [data])
        counts = (await system.read()).counts
        assert system.name == "epd" and len(system.pids["pd"]) == 2
    assert (counts["handed_over"], counts["kv_loaded"], counts["kv_lost"]) == (3, 3, 0)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--pds", "1"), "0 prefill and 1 decode workers"),
        (("--pds", "4", "--prefills", "2", "--decodes", "1"), "2 prefill and 1 decode workers"),
        (("--pds", "4", "--prefills", "4"), "4 prefill and 0 decode workers"),
        (("--pds", "4", "--decodes", "5"), "-1 prefill and 5 decode workers"),
    ],
)
def test_it_has_as_many_pd_workers_as_the_others(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    told: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare", "--systems", "ours,epd", *arguments])
    assert compare_main() == 2
    assert told in capsys.readouterr().err
