"""Recent requests, as a gateway tells them (``GET /ui/api/live``). Older gateways do not."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

TIMEOUT_S = 1.0
AGAIN_S = 5.0
"""After an answer of no use it is asked again so much later."""

PATH = "/ui/api/live"
_ANYWHERE = ("0.0.0.0", "::", "[::]")


@dataclass(frozen=True, slots=True)
class Row:
    """A request in words."""

    request_id: str
    state: str
    model: str
    items: str
    pd: str
    first: str
    ended: str


class RecentRequests:
    """Asks one gateway. Use as an async context manager.

    Args:
        url: The gateway that the operator named; empty: the registry's, which gets no key, as a record there
            is only what some process claims.
        key: Its API key.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url = url
        self._key = os.environ.get("EPD_API_KEY", "") if key is None else key
        self._client = httpx.AsyncClient(timeout=TIMEOUT_S)
        self._again_at = 0.0
        self.note = ""
        """Why there are none, where the operator can do something about it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def rows(self, registered: list[str]) -> list[Row] | None:
        """The newest requests first; None where no gateway tells.

        Args:
            registered: URLs of gateways that are alive, by the registry.
        """
        if time.monotonic() < self._again_at:
            return None
        url = self._url or next((reachable(each) for each in registered), "")
        self.note = ""
        try:
            if url and (told := await self._ask(url)) is not None:
                return [row(each) for each in told if isinstance(each, dict)]
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if self._url:
                reason = str(error) or type(error).__name__
                self.note = (
                    f"no recent requests, as {self._url} (--gateway) does not answer: {reason}"
                )
        except ValueError:
            pass  # no JSON
        self._again_at = time.monotonic() + AGAIN_S
        return None

    async def _ask(self, url: str) -> list[Any] | None:
        headers = {"authorization": f"Bearer {self._key}"} if self._key and self._url else {}
        answer = await self._client.get(url.rstrip("/") + PATH, headers=headers)
        if answer.status_code in (401, 403):
            self.note = "recent requests need an API key: EPD_API_KEY, with --gateway URL"
            return None
        if answer.status_code != 200:
            return None
        told = answer.json()
        found = told.get("requests") if isinstance(told, dict) else None
        return found if isinstance(found, list) else None


def reachable(url: str) -> str:
    """A gateway's URL as one asks it from its own machine: one that listens on all addresses, on loopback."""
    parts = urlsplit(url)
    if parts.hostname not in _ANYWHERE:
        return url
    return f"{parts.scheme}://127.0.0.1:{parts.port}"


def row(receipt: dict[str, Any]) -> Row:
    """A receipt in words; what it lacks is left empty."""
    items = receipt.get("items")
    origins = Counter(
        str(item.get("origin") or "open")
        for item in (items if isinstance(items, list) else [])
        if isinstance(item, dict)
    )
    workers = [receipt.get(stage) for stage in ("prefill", "pd")]
    status = receipt.get("status")
    state = str(receipt.get("state") or "")
    return Row(
        request_id=str(receipt.get("request_id") or ""),
        state=f"{state} {status}" if status and state != "answered" else state,
        model=str(receipt.get("model") or ""),
        items=", ".join(f"{n} {origin}" for origin, n in sorted(origins.items())),
        pd=" > ".join(str(each.get("worker") or "") for each in workers if isinstance(each, dict)),
        first=_seconds(receipt.get("first_s")),
        ended=_seconds(receipt.get("ended_s")),
    )


def _seconds(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return f"{value:.3f} s"
