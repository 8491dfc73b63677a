"""Settings of the gateway."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from epd_common.settings import IngestSettings
from epd_gateway.addresses import AllowedHost, parse_allowed_hosts


class GatewaySettings(IngestSettings):
    """Environment of ``epd-gateway``."""

    host: str = Field("127.0.0.1", description="Address the HTTP server listens on.")
    port: int = Field(
        8000, ge=0, le=65535, description="Port of the HTTP server; 0 takes a free one."
    )
    max_body_bytes: int = Field(
        64 << 20, ge=1024, description="Bytes of a request's body, at most."
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
        return parse_allowed_hosts(value) if isinstance(value, str) else value
