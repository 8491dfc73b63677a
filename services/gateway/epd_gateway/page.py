"""The web page at ``/ui``: files of this package, given out as they are."""

from __future__ import annotations

import hashlib
from importlib import resources

from fastapi import FastAPI, Request
from fastapi.responses import Response

from epd_common.errors import NotFoundError

PAGE = "/ui"
INDEX = "index.html"
_SCRIPT = "text/javascript; charset=utf-8"

FILES = {
    "advice.js": _SCRIPT,
    "api.js": _SCRIPT,
    "app.js": _SCRIPT,
    "commands.js": _SCRIPT,
    "dom.js": _SCRIPT,
    "failure.js": _SCRIPT,
    "format.js": _SCRIPT,
    "icon.svg": "image/svg+xml",
    "pictures.js": _SCRIPT,
    "playground.js": _SCRIPT,
    "poll.js": _SCRIPT,
    "receipt.js": _SCRIPT,
    "recent.js": _SCRIPT,
    "style.css": "text/css; charset=utf-8",
    "system.js": _SCRIPT,
    "timeline.js": _SCRIPT,
    "waterfall.js": _SCRIPT,
}
"""Content types of what lies beside the page, by name."""

PATHS = frozenset({PAGE, f"{PAGE}/", *(f"{PAGE}/{name}" for name in FILES)})
"""All that is given out here. None of it says anything of the system, so it needs no API key."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",  # previews of the pictures that were chosen
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Nothing from elsewhere, nothing inline, and no text that becomes markup."""

_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Kept, and asked about each time, so that a page and its scripts are of one version.
    "cache-control": "no-cache",
}


class PageFile:
    """A file, and the headers that it goes out with."""

    def __init__(self, name: str, content_type: str) -> None:
        self._content = resources.files(__package__).joinpath("page", name).read_bytes()
        self._etag = f'"{hashlib.sha256(self._content).hexdigest()[:32]}"'
        self._headers = {**_HEADERS, "etag": self._etag}
        self._content_type = content_type

    def answer(self, request: Request) -> Response:
        """The file, or 304 for who has it."""
        known = [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]
        if self._etag in (tag.removeprefix("W/") for tag in known) or "*" in known:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, media_type=self._content_type, headers=self._headers)


def add_page_routes(app: FastAPI) -> None:
    """Serve the page, from memory; its files are read now."""
    index = PageFile(INDEX, "text/html; charset=utf-8")
    files = {name: PageFile(name, content_type) for name, content_type in FILES.items()}

    async def page(request: Request) -> Response:
        return index.answer(request)

    async def part(request: Request) -> Response:
        name = request.path_params["file"]
        if name not in files:
            raise NotFoundError(f"the page has no file {name[:100]!r}", param="file")
        return files[name].answer(request)

    app.add_route(PAGE, page, methods=["GET"])
    app.add_route(f"{PAGE}/{{file}}", part, methods=["GET"])
