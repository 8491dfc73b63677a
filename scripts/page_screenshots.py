"""Makes the pictures of the web page in ``docs/images``: asks a gateway that runs, and takes them.

    .venv/bin/epd up &
    .venv/bin/python scripts/page_screenshots.py [--url http://127.0.0.1:8000] [--folder docs/images]

The questions are such as the small model of the repository answers. Needs a Chromium: ``scripts/browser.sh``.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.async_api import Browser, Page, async_playwright, expect

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from models import shapes  # noqa: E402 - not part of the distribution

SIZES = {"desktop": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}
SCHEMES = ("light", "dark")
QUESTION = "Describe image #2."
PHONE_PARTS = {"light": "#ask", "dark": "#detail"}
"""On a phone all parts stand below each other, so a picture shows one of them."""

OTHERS = 12
"""Requests beside, so that there is something to see."""


def drawn(rng: random.Random) -> Image.Image:
    return shapes.draw(shapes.random_scene(rng), 112, 168, rng)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


async def ask_others(url: str, rng: random.Random, known: list[Image.Image]) -> None:
    """A mix of requests: some with pictures that were there before, one that is refused."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]

        async def one(number: int) -> None:
            await asyncio.sleep(rng.random() * 3)
            pictures = [drawn(rng) for _ in range(number % 4)]
            pictures += known[: number % 3]
            parts: list[dict[str, Any]] = [
                {"type": "image_url", "image_url": {"url": shapes.data_uri(image)}}
                for image in pictures
            ]
            parts.append({"type": "text", "text": f"Describe image #{max(1, len(pictures))}."})
            name = "another" if number == 5 else model
            messages = [{"role": "user", "content": parts}]
            body = {
                "model": name,
                "messages": messages,
                "max_tokens": 24,
                "stream": number % 2 == 0,
            }
            await http.post("/v1/chat/completions", json=body)

        await asyncio.gather(*map(one, range(OTHERS)))


async def take(browser: Browser, url: str, folder: Path, known: Image.Image) -> None:
    rng = random.Random()
    for size, viewport in SIZES.items():
        for scheme in SCHEMES:
            scale = 2 if size == "phone" else 1
            context = await browser.new_context(
                viewport=viewport, color_scheme=scheme, device_scale_factor=scale
            )
            page = await context.new_page()
            await page.goto(f"{url}/ui")
            await ask(page, [known, drawn(rng), drawn(rng)])
            path = folder / f"page-{size}-{scheme}.png"
            clip = await part_of(page, PHONE_PARTS[scheme]) if size == "phone" else None
            await page.screenshot(path=path, full_page=True, clip=clip)
            Image.open(path).quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
            print(path, f"{path.stat().st_size / 1000:.0f} KB")
            await context.close()


async def part_of(page: Page, selector: str) -> Any:
    """The full width of a part of the page, with the header if it is the first one."""
    box = await page.locator(selector).bounding_box()
    assert box is not None
    top = 0 if selector == "#ask" else box["y"] - 8
    width = SIZES["phone"]["width"]
    return {"x": 0, "y": top, "width": width, "height": box["y"] + box["height"] + 8 - top}


async def ask(page: Page, pictures: list[Image.Image]) -> None:
    files: Any = [
        {"name": f"shape-{number}.png", "mimeType": "image/png", "buffer": png(image)}
        for number, image in enumerate(pictures, 1)
    ]
    await expect(page.get_by_label("Model")).not_to_have_value("", timeout=10_000)
    await page.get_by_label("Choose pictures").set_input_files(files)
    await page.get_by_label("Question").fill(QUESTION)
    await page.get_by_role("button", name="Ask").click()
    receipt = page.locator("#own-waterfall").get_by_role("button", name="Receipt")
    await expect(receipt).to_be_visible(timeout=60_000)
    await receipt.click()
    await expect(page.locator("#detail .facts")).to_be_visible()
    await page.evaluate("document.activeElement.blur(), scrollTo(0, 0)")
    await page.wait_for_timeout(2500)  # a few points in the queues' lines


async def run(program: str, url: str, folder: Path) -> None:
    rng = random.Random()
    known = drawn(random.Random(7))
    await ask_others(url, rng, [known])

    async def go_on() -> None:
        while True:
            await ask_others(url, rng, [known])

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program)
        load = asyncio.create_task(go_on())
        await take(browser, url, folder, known)
        load.cancel()
        await browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "images")
    arguments = parser.parse_args()
    program = [ROOT / "scripts" / "browser.sh"]
    found = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True)
    asyncio.run(run(found.stdout.strip(), arguments.url, arguments.folder))


if __name__ == "__main__":
    main()
