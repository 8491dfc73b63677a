"""Settings that every service shares, read from ``EPD_*`` environment variables.

Each service has its own class on top of :class:`CommonSettings`, built once in ``main()`` and handed down.
A bad value fails at start, naming the variable, the value and what is allowed. The table in
``docs/configuration.md`` is generated from these classes.
"""

from __future__ import annotations

import os
import shlex
import socket
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, FilePath, ValidationError, field_validator, model_validator
from pydantic.config import JsonDict
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from epd_common.ingest.limits import IngestLimits
from epd_common.login import (
    NatsLogin,
    check_ca,
    check_redis_url,
    check_users_alone,
    nats_servers,
    read_password,
)
from epd_common.protocol.lanes import AGED_WAITS_S
from epd_common.protocol.subjects import ANY_PLACE, LONGEST_MODEL_TOKEN, model_token
from epd_common.store.nixl import NixlOptions

PREFIX = "EPD_"
SECRET: JsonDict = {"secret": True}
"""Marks a setting whose value no message shows."""

S = TypeVar("S", bound="CommonSettings")


class SettingsError(Exception):
    """One or more environment variables hold values that cannot be used."""


class CommonSettings(BaseSettings):
    """What the gateway, encoders and PD workers have in common."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="ignore", frozen=True, allow_inf_nan=False
    )

    nats_url: str = Field(
        "nats://127.0.0.1:4222",
        description="NATS server, credentials inside; `tls://` insists on TLS. Several servers of one "
        "cluster with commas between them: when one is lost, another is taken.",
        json_schema_extra=SECRET,
    )
    nats_replicas: int = Field(
        1,
        ge=1,
        le=5,
        description="Servers that hold each stream: 3 on a cluster of three, where any one may be lost; the "
        "gateway's value counts.",
    )
    nats_creds: FilePath | None = Field(
        None, description="Credentials file of a NATS user (JWT and NKey seed)."
    )
    nats_nkey_seed_file: FilePath | None = Field(
        None, description="File with the NKey seed of a NATS user."
    )
    nats_password_file: FilePath | None = Field(
        None,
        description="File with the password of the user that `EPD_NATS_URL` names, which then has none.",
    )
    nats_ca: FilePath | None = Field(
        None,
        description="Certificates (PEM) that NATS's may be signed by; insists on TLS. Default: the system's.",
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="Valkey or Redis, credentials inside; `unix://` for a socket, `rediss://` for TLS.",
        json_schema_extra=SECRET,
    )
    redis_password_file: FilePath | None = Field(
        None,
        description="File with the password for `EPD_REDIS_URL`, which then has none.",
    )
    redis_ca: FilePath | None = Field(
        None,
        description="Certificates (PEM) that Valkey's may be signed by, with `rediss://`. Default: the "
        "system's.",
    )
    node: str = Field(
        default_factory=socket.gethostname,
        description="Name of this node; workers that share it share an arena. Default: host name.",
    )
    worker_id: str = Field(
        default_factory=lambda: uuid.uuid4().hex[:12],
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="Name of this process in the registry, which no other process may have. Default: random.",
    )
    log_level: str = Field(
        "info", pattern=r"^(debug|info|warning|error)$", description="Log level."
    )
    log_format: str = Field("json", pattern=r"^(json|text)$", description="Form of log lines.")
    otlp_endpoint: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="OpenTelemetry collector that gets traces by OTLP over HTTP, e.g. "
        "`http://collector:4318`. Empty: no traces.",
    )
    trace_sample: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of requests that are traced, of those whose client sends no `traceparent`.",
    )
    broker_wait_s: float = Field(
        30.0,
        ge=0,
        description="Seconds that a service waits at its start for NATS and Valkey that do not answer yet; a "
        "login that is refused ends it at once.",
    )
    heartbeat_s: float = Field(
        2.0, gt=0, le=60, description="Seconds between heartbeats; three missed ones mean dead."
    )
    drain_s: float = Field(
        30.0, ge=0, description="Seconds that running work gets to finish after SIGTERM."
    )
    media_ttl_s: int = Field(
        900,
        ge=10,
        description="Seconds that media bytes stay in the media store after a request last sent or named "
        "them.",
    )
    embedding_ttl_s: int = Field(
        900, ge=10, description="Seconds that an embedding stays in Redis after its last use."
    )
    encode_lease_s: float = Field(
        60.0,
        gt=0,
        description="Seconds after which an encode that nobody finished may be started again.",
    )
    queue_max_jobs: int = Field(
        10_000,
        ge=1,
        description="Jobs a queue holds before it answers 429; the gateway's value counts.",
    )

    @field_validator("nats_url")
    @classmethod
    def _are_servers(cls, value: str) -> str:
        nats_servers(value)
        return value

    @field_validator("redis_url")
    @classmethod
    def _is_a_redis_url(cls, value: str) -> str:
        check_redis_url(value)
        return value

    @field_validator("worker_id")
    @classmethod
    def _is_a_place(cls, value: str) -> str:
        if value == ANY_PLACE:
            raise ValueError(f"{ANY_PLACE!r} stands for every worker")
        return value

    @field_validator(
        "nats_creds",
        "nats_nkey_seed_file",
        "nats_password_file",
        "nats_ca",
        "redis_password_file",
        "redis_ca",
        mode="before",
    )
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        return None if value == "" else value

    @model_validator(mode="after")
    def _check_logins(self) -> Self:
        self.nats_login().check()
        if self.nats_password_file is not None:
            check_users_alone(self.nats_url)
        if self.redis_password_file is not None:
            if urlsplit(self.redis_url).password is not None:
                raise ValueError(
                    "EPD_REDIS_PASSWORD_FILE is set, so EPD_REDIS_URL must hold no password: "
                    "redis://USER@HOST:PORT/0"
                )
            read_password(self.redis_password_file, "EPD_REDIS_PASSWORD_FILE")
        if self.redis_ca is not None:
            if not self.redis_url.startswith("rediss://"):
                raise ValueError("EPD_REDIS_CA is set, so EPD_REDIS_URL must begin with rediss://")
            check_ca(self.redis_ca, "EPD_REDIS_CA")
        return self

    def nats_login(self) -> NatsLogin:
        return NatsLogin(
            creds=self.nats_creds,
            nkey_seed_file=self.nats_nkey_seed_file,
            password_file=self.nats_password_file,
            ca=self.nats_ca,
        )


class IngestSettings(CommonSettings):
    """What a request's media may cost, for who reads requests: the gateway, and PD workers (direct jobs)."""

    max_media_bytes: int = Field(32 << 20, ge=1024, description="Bytes of one picture, at most.")
    max_pixels: int = Field(100_000_000, ge=1, description="Pixels of one picture, at most.")
    max_items: int = Field(64, ge=1, description="Media items of one request, at most.")
    deadline_s: float = Field(
        120.0,
        gt=0,
        description="Seconds a request may take; the header `x-epd-deadline-s`, or a job's own deadline, "
        "makes it shorter.",
    )

    def ingest_limits(self) -> IngestLimits:
        return IngestLimits(
            max_media_bytes=self.max_media_bytes,
            max_pixels=self.max_pixels,
            max_items=self.max_items,
        )


class EncodeSettings(CommonSettings):
    """For who takes encode jobs: encoders, and PD workers of role ``ec_both``."""

    encoder_slots: int = Field(
        16, ge=1, description="Encode jobs in work at once; the engine batches them in its steps."
    )
    encode_ahead_s: float = Field(
        0.5,
        ge=0,
        description="Seconds of encode work that a worker takes at once, by the rate at which its jobs end, "
        "so that a slow one has few: one job in any case, `EPD_ENCODER_SLOTS` at most. 0: as many as slots.",
    )


class WorkerSettings(CommonSettings):
    """What encoders and PD workers have in common."""

    engine: Literal["vllm", "sim"] = Field(
        "vllm",
        description="`vllm`, or `sim`: no model; answers are digests of what was given, in the time of "
        "`EPD_SIM_PROFILE`.",
    )
    model: str = Field(
        description="Path or hub id of the model; with `EPD_ENGINE=sim` a name that is not looked up."
    )
    served_model: str = Field(
        "", description="Name the model is served under. Default: `EPD_MODEL`."
    )
    revision: str = Field("", description="Revision of the model, part of the fingerprint.")
    arena_dir: Path = Field(
        Path("/dev/shm/epdflow"), description="Folder of the node's arena, on tmpfs."
    )
    arena_bytes: int = Field(
        2 << 30,
        ge=1 << 20,
        description="Bytes the arena may hold before it evicts; 7/8 of its file system's size at most.",
    )
    stores: Annotated[tuple[str, ...], NoDecode] = Field(
        ("arena", "redis"),
        description="Stores an encoder writes to and a PD worker reads from, nearest first: "
        "`arena` (same node), `nixl` (memory of the worker that encoded it, by RDMA, TCP or shared memory; "
        "needs the extra `nixl`), `redis` (any node, also when that worker is gone).",
    )
    lane_waits_s: Annotated[tuple[float, ...], NoDecode] = Field(
        AGED_WAITS_S,
        description="Seconds that a job of lanes `l1`, `l2` and `l3` waits longer than one of `l0`, at most. "
        "`0,0,0`: the oldest job comes first, whatever its lane.",
    )
    redis_embedding_bytes: int = Field(
        0,
        ge=0,
        description="Bytes of all embeddings in Valkey together, alike for all workers, beyond which the "
        "least recently used go. 0: half of Valkey's `maxmemory`, and no bound where it has none.",
    )
    nixl_bytes: int = Field(
        512 << 20,
        ge=1 << 20,
        description="Bytes of registered memory in which a worker that encodes keeps embeddings for others, "
        "with `nixl`; taken as they are needed.",
    )
    nixl_ready_bytes: int = Field(
        256 << 20,
        ge=0,
        description="Bytes of files in the arena that are made ready for what comes by `nixl`, beside "
        "`EPD_ARENA_BYTES`. 0: each file is made when it is needed, which takes longer than reading.",
    )
    nixl_timeout_s: float = Field(
        0.8,
        gt=0,
        le=60,
        description="Seconds that reading an embedding by `nixl` may take before the next store is tried.",
    )
    nixl_lease_s: float = Field(
        5.0,
        gt=0,
        le=600,
        description="Seconds after which a reader that has not said that it is done counts as dead, and what "
        "it read may be evicted; longer than `EPD_NIXL_TIMEOUT_S`.",
    )
    stall_s: float = Field(
        120.0,
        ge=0,
        description="Seconds without a step after which an engine that has work is held for hung, and its "
        "worker ends; well above the longest step (prefill of a long prompt, a large video). 0: never.",
    )
    metrics_port: int = Field(
        0,
        ge=0,
        le=65_535,
        description="Port of the worker's own `/metrics`, for Prometheus; each worker of a host needs one of "
        "its own. 0: none is opened.",
    )
    metrics_host: str = Field(
        "127.0.0.1",
        description="Address on which `EPD_METRICS_PORT` is opened; it asks for no key.",
    )
    engine_args: str = Field(
        "", description="More arguments for the vLLM engine, as on vLLM's command line."
    )

    @field_validator("stores", "lane_waits_s", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("stores")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        allowed = ("arena", "nixl", "redis")
        if not value or any(name not in allowed for name in value):
            raise ValueError(f"must be a comma-separated list of {', '.join(allowed)}")
        return value

    @field_validator("lane_waits_s")
    @classmethod
    def _one_for_each_lane(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if len(value) != len(AGED_WAITS_S) or not all(0 <= wait < float("inf") for wait in value):
            raise ValueError("must be three numbers of 0 or more with commas between them")
        return value

    @field_validator("engine_args")
    @classmethod
    def _is_a_command_line(cls, value: str) -> str:
        try:
            shlex.split(value)
        except ValueError as error:
            raise ValueError(f"it cannot be read as a command line: {error}") from None
        return value

    @model_validator(mode="after")
    def _check_model_name(self) -> Self:
        name, how = self.model_name, "set EPD_SERVED_MODEL to another, which clients use"
        if not name or not name.isprintable():
            raise ValueError(
                f"{name!r} cannot be a model's name, as it must have characters that print: {how}"
            )
        if (length := len(model_token(name))) > LONGEST_MODEL_TOKEN:
            raise ValueError(
                f"the model's name {name!r} is too long: {length} of {LONGEST_MODEL_TOKEN} characters, as "
                f"each byte that is no letter, digit, _ or - counts as three: {how}"
            )
        return self

    @model_validator(mode="after")
    def _leases_outlast_reads(self) -> Self:
        if self.nixl_lease_s <= self.nixl_timeout_s:
            raise ValueError(
                f"EPD_NIXL_LEASE_S={self.nixl_lease_s:g} must be more than "
                f"EPD_NIXL_TIMEOUT_S={self.nixl_timeout_s:g}"
            )
        return self

    def nixl_options(self) -> NixlOptions:
        return NixlOptions(
            node=self.node,
            region_bytes=self.nixl_bytes,
            ready_bytes=self.nixl_ready_bytes,
            timeout_s=self.nixl_timeout_s,
            lease_s=self.nixl_lease_s,
        )

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.served_model or self.model


def load_settings(cls: type[S], **given: Any) -> S:
    """Build the settings from the environment.

    Args:
        given: Settings that come from elsewhere, e.g. a command line.

    Raises:
        SettingsError: naming each variable, its value and what is allowed.
    """
    try:
        return cls(**given)
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_input=False):
            said = problem["msg"].removeprefix("Value error, ")
            if not problem["loc"]:  # settings that do not fit each other; the text names them
                lines.append(said)
                continue
            name = str(problem["loc"][0])  # what follows is the place in a list
            variable, setting = PREFIX + name.upper(), cls.model_fields[name]
            if problem["type"] == "missing":
                lines.append(f"{variable} is not set: {setting.description}")
            elif setting.json_schema_extra == SECRET:
                lines.append(f"{variable}: {said}")
            else:
                value = os.environ.get(variable, "")
                lines.append(f"{variable}={value!r}: {said}")
        raise SettingsError(
            "\n".join(dict.fromkeys(lines))
        ) from None  # the cause shows what was given
