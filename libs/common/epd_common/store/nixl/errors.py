"""Why an embedding could not be read by NIXL. None of these fails a request: another store is tried next."""

from __future__ import annotations

from typing import Literal, get_args

from epd_common.errors import EpdError

Reason = Literal["gone", "late", "unknown", "incompatible", "refused", "stale", "memory"]
"""The peer's process or host is away; it did not answer in time; nothing is known of it; it has another
version; the locator says what cannot be; other bytes lie there now; no memory could be registered here."""

REASONS: tuple[Reason, ...] = get_args(Reason)


class NotReadError(EpdError):
    """An embedding was not read from its peer."""

    default_code = "nixl_not_read"

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NixlMissingError(EpdError):
    """``EPD_STORES`` names ``nixl``, and it cannot be used here."""

    default_code = "nixl_missing"
