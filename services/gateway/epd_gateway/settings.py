"""Settings of the gateway."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from epd_common.settings import CommonSettings
from epd_gateway.addresses import AllowedHost, parse_allow_hosts


class GatewaySettings(CommonSettings):
    """Environment of ``epd-gateway``."""

    host: str = Field("127.0.0.1", description="Address the HTTP server listens on.")
    port: int = Field(
        8000, ge=0, le=65535, description="Port of the HTTP server; 0 takes a free one."
    )
    max_body_bytes: int = Field(
        64 << 20, ge=1024, description="Bytes of a request's body, at most."
    )
    max_media_bytes: int = Field(32 << 20, ge=1024, description="Bytes of one picture, at most.")
    max_pixels: int = Field(100_000_000, ge=1, description="Pixels of one picture, at most.")
    max_items: int = Field(64, ge=1, description="Media items of one request, at most.")
    deadline_s: float = Field(
        120.0,
        gt=0,
        description="Seconds a request may take; the header `x-epd-deadline-s` makes it shorter.",
    )
    media_timeout_s: float = Field(10.0, gt=0, description="Seconds to fetch one media URL.")
    media_allow_hosts: Annotated[tuple[AllowedHost, ...], NoDecode] = Field(
        (),
        description="Comma-separated `host[:port]`: opens plain http and private addresses for media "
        "URLs of these hosts alone.",
    )

    @field_validator("media_allow_hosts", mode="before")
    @classmethod
    def _parse_hosts(cls, value: object) -> object:
        return parse_allow_hosts(value) if isinstance(value, str) else value
