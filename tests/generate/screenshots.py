"""`make screenshots` takes the documents' pictures of the status page from the demo.

For each picture, a text file of the same name has the page's title and columns. A test compares
them with the current page.
"""

import asyncio
import io
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from playwright.async_api import Page

from tests.support.browser import chromium, standing_demo
from tests.support.documents import ROOT


FOLDER = ROOT / "docs" / "images"
COLOURS = 256
WORDS = "h1, th[scope=col]:not(:has(svg))"
SCALE = 1.5
"""Pixels of the picture per pixel of the page. The picture is then sharp on most screens."""


class Shot(NamedTuple):
    """One picture: its file, the window size, the URL, and the part to show."""

    name: str
    window: dict[str, Any]
    query: str = ""
    part: str = "header"


SHOTS = (
    Shot("status-light", {"viewport": {"width": 1200, "height": 1420}, "color_scheme": "light"}),
    Shot(
        "status-dark",
        {"viewport": {"width": 1200, "height": 1000}, "color_scheme": "dark"},
        query="?sort=name",
        part="#blocked",
    ),
    Shot(
        "vm",
        {"viewport": {"width": 1200, "height": 1250}, "color_scheme": "light"},
        query="vmis/bank/flaky-1",
    ),
    Shot("status-narrow", {"viewport": {"width": 360, "height": 1180}, "color_scheme": "light"}),
)


async def take() -> None:
    """Write every picture."""
    async with standing_demo() as demo, chromium() as browser:
        for shot in SHOTS:
            context = await browser.new_context(device_scale_factor=SCALE, **shot.window)
            page = await context.new_page()
            await page.goto(f"{demo.query}/{shot.query}")
            await page.evaluate(
                "part => scrollTo(0, document.querySelector(part).offsetTop - 24)", shot.part
            )
            path = FOLDER / f"{shot.name}.png"
            write_picture(await page.screenshot(), path)
            path.with_suffix(".txt").write_text(await read_words(page), encoding="utf-8")
            await context.close()
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")


async def read_words(page: Page) -> str:
    """The title and the columns of a page, one a line."""
    drawn = await page.locator(WORDS).all_text_contents()
    words = dict.fromkeys(" ".join(text.split()) for text in drawn)
    return "\n".join(words) + "\n"


def write_picture(picture: bytes, path: Path) -> None:
    """Write the picture with a palette, so that it needs only a third of the bytes."""
    with Image.open(io.BytesIO(picture)) as image:
        few = image.convert("RGB").quantize(
            COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE
        )
        few.save(path, optimize=True)


if __name__ == "__main__":
    asyncio.run(take())
