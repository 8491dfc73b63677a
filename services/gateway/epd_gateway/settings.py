"""Settings of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, FilePath, field_validator
from pydantic_settings import NoDecode

from epd_common.api_keys import ApiKey, CacheScope, parse_list
from epd_common.settings import SECRET, IngestSettings
from epd_gateway.addresses import AllowedHost, parse_allowed_hosts
from epd_gateway.auth import read_keys


class GatewaySettings(IngestSettings):
    """Environment of ``epd-gateway``."""

    host: str = Field("127.0.0.1", description="Address the HTTP server listens on.")
    port: int = Field(
        8000, ge=0, le=65535, description="Port of the HTTP server; 0 takes a free one."
    )
    drain_notice_s: float = Field(
        3.0,
        ge=0,
        description="Seconds after SIGTERM in which `/ready` says no while requests are still taken, so that "
        "load balancers turn away first; `EPD_DRAIN_S` begins after them.",
    )
    max_body_bytes: int = Field(
        64 << 20, ge=1024, description="Bytes of a request's body, at most."
    )
    body_timeout_s: float = Field(
        60.0, gt=0, description="Seconds in which a request's body must have come."
    )
    media_timeout_s: float = Field(10.0, gt=0, description="Seconds to fetch one media URL.")
    media_allow_hosts: Annotated[tuple[AllowedHost, ...], NoDecode] = Field(
        (),
        description="Comma-separated `host[:port]`: opens plain http and private addresses for media "
        "URLs of these hosts alone.",
    )

    api_keys_file: FilePath | None = Field(
        None,
        description="File of API keys' hashes, one a line as `epd key new` prints it; read again when it "
        "changes. With this or `EPD_API_KEYS`, requests need a key.",
    )
    api_keys: Annotated[tuple[ApiKey, ...], NoDecode] = Field(
        (),
        description="API keys' hashes as in that file, with `;` between them.",
        json_schema_extra=SECRET,
    )
    cache_scope: CacheScope = Field(
        "tenant",
        description="Whose embeddings a request may reuse: `tenant`, those of its API key's tenant, or "
        "`shared`, those of all. A key's own `cache_scope=` comes first.",
    )

    admission_capacity: int = Field(
        0,
        ge=0,
        description="Cost that all open requests of a model may have together, in weighted tokens; beyond it "
        "429. 0: 65536 for each slot of its PD workers.",
    )
    admission_line: float = Field(
        0.75,
        gt=0,
        le=1,
        description="Share of the capacity from which on a tenant may hold no more than its own share, by "
        "the weights of API keys. What is above is kept for tenants that hold less.",
    )
    admission_least: int = Field(
        8192,
        ge=0,
        description="Cost that a tenant may hold in any case while there is room, however small its share.",
    )
    admission_visual_weight: float = Field(
        2.0, gt=0, description="Cost of a row of a picture; a token of text costs 1."
    )
    admission_answer_weight: float = Field(
        1.0,
        gt=0,
        description="Cost of a token that a request may generate (`max_tokens`, or 512).",
    )

    placement: Literal["prefix", "any"] = Field(
        "any",
        description="`prefix` sends a request to the PD worker that says it holds its beginning in its "
        "prefix cache, else to one whose node has its embeddings, else requests that begin alike, such as "
        "the turns of a conversation, to the same worker; never to one that has too much work. `any` leaves "
        "each to whoever is free.",
    )

    tenant_media_bytes: int = Field(
        0,
        ge=0,
        description="Bytes of pictures, recordings and large bodies that an API key's tenant may have in the "
        "media store at once; beyond them 429. 0: a quarter of Valkey's `maxmemory`; no bound where it has "
        "none.",
    )

    @field_validator("api_keys_file", mode="before")
    @classmethod
    def _no_file(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("api_keys_file")
    @classmethod
    def _readable(cls, value: Path | None) -> Path | None:
        if value is not None:
            try:
                read_keys(value.read_bytes())
            except OSError as error:
                raise ValueError(f"it cannot be read: {error.strerror}") from None
        return value

    @field_validator("api_keys", mode="before")
    @classmethod
    def _parse_keys(cls, value: object) -> object:
        return parse_list(value) if isinstance(value, str) else value

    @field_validator("media_allow_hosts", mode="before")
    @classmethod
    def _parse_hosts(cls, value: object) -> object:
        return parse_allowed_hosts(value) if isinstance(value, str) else value
