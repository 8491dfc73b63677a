"""Who asks: API keys at the HTTP edge, and what each key's tenant may share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from fastapi import Request
from prometheus_client import Counter
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from epd_common.api_keys import ApiKey, CacheScope, hash_key, parse_file
from epd_common.errors import UnauthorizedError, UnavailableError, openai_body
from epd_common.tasks import end
from epd_gateway import page

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between looks at whether the file of keys is another one."""

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", *page.PATHS})
"""What load balancers and monitoring ask, which have no key, and the web page, which asks for one and sends
it for all that it shows. Everything else needs one."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a request comes from.

    Attributes:
        tenant: Empty where no keys are set.
        scope: Whose cache entries it may use: the tenant's, or (empty) those that all share.
        weight: The tenant's share relative to others.
        most_urgent: The lowest priority that it may ask for; None for any.
    """

    tenant: str = ""
    scope: str = ""
    weight: float = 1.0
    most_urgent: int | None = None


def caller_of(request: Request) -> Caller:
    """Whom :class:`RequireKey` let in."""
    caller: Caller = request.state.caller
    return caller


class KeyRing:
    """The keys that are valid now. Use as an async context manager; while it is open it follows the file.

    Args:
        fixed: Keys that are always valid.
        path: A file of more; it may be replaced at any time.
    """

    def __init__(self, fixed: Sequence[ApiKey], path: Path | None) -> None:
        self._fixed = fixed
        self._path = path
        self._keys: dict[str, ApiKey] = {}
        self._weights: dict[str, float] = {}
        self._seen: tuple[int, ...] = ()
        self._task: asyncio.Task[None] | None = None

    @property
    def required(self) -> bool:
        """Whether requests need a key at all."""
        return bool(self._fixed) or self._path is not None

    @property
    def several(self) -> bool:
        """Whether there are tenants to protect from each other."""
        return len(self._weights) > 1

    def find(self, key: bytes) -> ApiKey | None:
        """The entry of a key.

        It is looked up by its hash. How long that takes can tell something of hashes, and nothing of keys.
        """
        return self._keys.get(hash_key(key))

    def weight(self, tenant: str) -> float:
        """A tenant's weight: the largest of its keys'."""
        return self._weights[tenant]

    async def __aenter__(self) -> Self:
        try:
            await self._load()
        except (OSError, ValueError) as error:
            raise UnavailableError(f"EPD_API_KEYS_FILE={self._path}: {error}") from error
        if self._path is not None:
            self._task = asyncio.create_task(self._follow(), name="API keys")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._task is not None:
            await end(self._task)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._load()
            except (OSError, ValueError) as error:
                logger.error("%s: %s; the keys stay as they were", self._path, error)

    async def _load(self) -> None:
        """Read the file, if it is another one than was read last.

        Raises:
            OSError, ValueError: it cannot be used. What is wrong with one state of it is said once.
        """
        read: Sequence[ApiKey] = ()
        if self._path is not None:
            seen = await asyncio.to_thread(_identity, self._path)
            if seen == self._seen:
                return
            self._seen = seen
            if not seen:
                raise FileNotFoundError("there is no such file")
            read = read_keys(await asyncio.to_thread(self._path.read_bytes))
        if self._keys:
            logger.info("API keys read again: %d of %d tenants", *_counts((*self._fixed, *read)))
        self._keys = {key.hash: key for key in (*self._fixed, *read)}
        self._weights = {}
        for key in self._keys.values():
            self._weights[key.tenant] = max(key.weight, self._weights.get(key.tenant, 0.0))


def read_keys(content: bytes) -> tuple[ApiKey, ...]:
    """The entries of a file, of which there must be one at least: it may just be being written.

    Raises:
        ValueError: naming the line and the reason.
    """
    try:
        keys = parse_file(content.decode())
    except UnicodeDecodeError:
        raise ValueError("the file is no text in UTF-8") from None
    if not keys:
        raise ValueError("the file holds no key; `epd key new` makes one")
    return keys


def _identity(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced or written; empty if it is not there."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _counts(keys: Sequence[ApiKey]) -> tuple[int, int]:
    return len(keys), len({key.tenant for key in keys})


class RequireKey:
    """ASGI middleware: lets nobody in without a key, before anything of the request is read.

    Args:
        cache_scope: For keys whose entry does not say.
        refused: Counts requests that are not let in.
    """

    def __init__(
        self, app: ASGIApp, *, keys: KeyRing, cache_scope: CacheScope, refused: Counter
    ) -> None:
        self._app = app
        self._keys = keys
        self._cache_scope = cache_scope
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                scope.setdefault("state", {})["caller"] = self._caller(scope)
            except UnauthorizedError as error:
                self._refused.inc()
                headers = {"www-authenticate": "Bearer"}
                answer = JSONResponse(openai_body(error), error.status, headers)
                return await answer(scope, receive, send)
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        if not self._keys.required:
            return Caller()
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, token = (given[0] if len(given) == 1 else b"").strip().partition(b" ")
        if scheme.lower() != b"bearer" or not token.strip():
            raise UnauthorizedError(
                "this needs an API key, in one header 'Authorization: Bearer KEY'"
            )
        key = self._keys.find(token.strip())
        if key is None:
            raise UnauthorizedError("this API key is not known here; ask for another one")
        shared = (key.cache_scope or self._cache_scope) == "shared"
        return Caller(
            key.tenant,
            "" if shared else key.tenant,
            weight=self._keys.weight(key.tenant),
            most_urgent=key.priority,
        )
