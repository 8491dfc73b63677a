"""The PD engine: vLLM as ``ec_consumer``, answering through its own OpenAI application in-process.

As ``ec_both`` it has the model's towers as well and can encode items.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import tempfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy

from epd_common.beginnings import Beginning
from epd_common.engines import (
    AnswerHead,
    AnswerPart,
    EngineInfo,
    KvHandle,
    KvLostError,
    Loaded,
    Placeholder,
    Progress,
    Told,
)
from epd_common.errors import BadRequestError, UpstreamError
from epd_common.ingest.body import COMPLETIONS, RESPONSES
from epd_common.ingest.contents import contents_of
from epd_common.ingest.data_uri import make_data_uri
from epd_common.kept import Kept
from epd_common.store import Arena
from epd_vllm.compat import vllm_version
from epd_vllm.engine import EngineOptions, VllmEngine
from epd_vllm.gate import managed_params
from epd_vllm.handover import HandoverNotes, prefill_only
from epd_vllm.kept_pipe import KeptReader
from epd_vllm.kv_transfer import KvOptions, check_nixl, kv_arguments, prepare_kv_environment
from epd_vllm.launch import inspect
from epd_vllm.model import check_model, needs_vision_tower
from epd_vllm.openai_app import OpenAIApp
from epd_vllm.responses import held_back, name_answer
from epd_vllm.tape import Tape

CACHE_MANAGER = "epd_vllm.cache_manager.GatedEncoderCacheManager"
SCHEDULER = "epd_vllm.scheduler.GatedScheduler"
ASYNC_SCHEDULER = "epd_vllm.scheduler.GatedAsyncScheduler"
_NOBODY = "epd-wake"
_LIMITS = {COMPLETIONS: "max_tokens", RESPONSES: "max_output_tokens"}
"""What a route calls the most tokens of an answer; others as chats do."""


class VllmPdEngine(VllmEngine):
    """Runs prefill and decode of a model; media reach its towers only by :meth:`encode`.

    Args:
        arena: Gives the folders of this worker.
        max_items: Items of one request, at most.
        encode: Whether it shall encode items: ``loaded`` if the model keeps its tower in any case.
        sleep_when_stalled: Let the engine's process sleep while all its requests wait for embeddings.
        kv_events: Have the engine tell what its prefix cache holds.
        kv: It hands prompts over, or takes them.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        arena: Arena,
        max_items: int,
        encode: Literal["never", "loaded", "always"] = "never",
        sleep_when_stalled: bool = True,
        kv_events: bool = False,
        kv: KvOptions | None = None,
    ) -> None:
        super().__init__(options, staging=arena.staging)
        self._pins = arena.pins
        self._max_items = max_items
        self._encode = encode
        self._sleep_when_stalled = sleep_when_stalled
        self._kv_events = kv_events
        self._kv = kv
        self._kept = Kept()
        self._reader = KeptReader(self._kept)
        self._fingerprint = ""
        self._traces = False
        """Whether the engine has spans of its own (``--otlp-traces-endpoint``)."""
        self._app: OpenAIApp | None = None
        self._answering: dict[str, list[str]] = {}
        """The keys of each request that is inside."""

    @property
    def owes(self) -> bool:
        return super().owes or any(
            all((self._pins / key).exists() for key in keys) for keys in self._answering.values()
        )

    @property
    def kept(self) -> Kept:
        return self._kept

    async def start(self, progress: Progress) -> EngineInfo:
        if not self._kv_events:
            return await self._start(progress, pipe="")
        # Nothing is left of the pipe's name once the engine has opened it.
        with tempfile.TemporaryDirectory(prefix="epd-kept-") as pipes:
            pipe = Path(pipes) / "pipe"
            self._reader.open(pipe)
            return await self._start(progress, pipe=str(pipe))

    async def _start(self, progress: Progress, *, pipe: str) -> EngineInfo:
        if self._kv is not None:
            check_nixl(self._kv, self._options.extra_arguments)
        folder = await asyncio.to_thread(
            check_model, self._options.model, self._options.extra_arguments
        )
        progress("importing vLLM")
        role: dict[str, str | None] = {}
        if self._kv is not None:
            prepare_kv_environment(self._kv, is_cpu=vllm_version()[1])
            role = kv_arguments(self._kv, self._options.extra_arguments)
        modalities = await inspect(self._arguments({}))
        tower = self._encode == "always" or needs_vision_tower(folder)
        encodes = tower and self._encode != "never"
        # Towers are not loaded where the model can do without, and then no media can reach them either.
        limits = dict.fromkeys(modalities.by_metadata, self._max_items if tower else 0)
        limits |= dict.fromkeys(modalities.raw, self._max_items)
        arguments = self._arguments(
            role
            | {
                "--kv-events-config": json.dumps(
                    # Told by the scheduler itself, by the pipe: nobody else need listen.
                    {"enable_kv_cache_events": self._kv_events, "publisher": "null"}
                ),
                "--disable-uvicorn-access-log": None,
                "--enable-mm-embeds": None,
                "--scheduling-policy": "priority",
                "--limit-mm-per-prompt": json.dumps(limits),
                "--ec-transfer-config": json.dumps(
                    {
                        "ec_connector": "EpdConnector",
                        "ec_connector_module_path": "epd_vllm.connector",
                        "ec_role": "ec_both" if encodes else "ec_consumer",
                        "ec_connector_extra_config": {
                            "pins": str(self._pins),
                            "staging": str(self._staging),
                            "sleep_when_stalled": self._sleep_when_stalled,
                            "kept_pipe": pipe,
                        },
                    }
                ),
                "--ec-manager-config": json.dumps({"encoder_cache_manager_cls": CACHE_MANAGER}),
                "--scheduler-cls": SCHEDULER if vllm_version()[1] else ASYNC_SCHEDULER,
            }
        )
        engine, parsed = await self._launch(arguments, progress)
        self._app = await OpenAIApp.build(engine, parsed)
        self._traces = await engine.is_tracing_enabled()
        info = await self._loaded(modalities, encodes=encodes)
        self._fingerprint = info.fingerprint
        progress("ready")
        return info

    async def answer(
        self,
        request_id: str,
        route: str,
        body: dict[str, Any],
        placeholders: list[Placeholder],
        told: Told | None = None,
        *,
        beginnings: Sequence[Beginning] = (),
        traceparent: str = "",
        hand_over: bool = False,
        kv: KvHandle | None = None,
        loaded: Loaded | None = None,
    ) -> AsyncGenerator[AnswerPart, None]:
        if self._app is None:
            raise RuntimeError("the engine was not started")
        if told is not None:
            self._check_told(told)
        notes = HandoverNotes(loaded) if hand_over or kv is not None else None
        if hand_over:
            body = prefill_only(body, _LIMITS.get(route, "max_completion_tokens"))
        elif kv is not None:
            body = body | {"kv_transfer_params": kv.params}
        put_placeholders(route, body, placeholders, self._fingerprint)
        if route == RESPONSES:
            name_answer(body, request_id)
        tape = Tape(told) if body.get("stream") else None
        call = self._app.call(
            route,
            msgspec.json.encode(body),
            request_id=request_id,
            tape=tape,
            beginnings=beginnings if self._kv_events else (),
            traceparent=traceparent if self._traces else "",
            notes=notes,
        )
        parts = call
        if route == RESPONSES and tape is not None:
            parts = held_back(call, request_id=request_id)
        head: AnswerHead | None = None
        self._answering[request_id] = [item.key for item in placeholders]
        try:
            async for part in parts:
                if isinstance(part, AnswerHead):
                    head = part  # vLLM sends a stream's before it knows whether there will be one
                    continue
                if notes is not None and notes.lost:
                    raise KvLostError("the engine could not load the prompt's keys and values")
                if hand_over and head is not None and head.status == 200:
                    continue  # what nobody sees
                if head is not None:
                    yield head
                    head = None
                yield part
            if hand_over and notes is not None and head is not None and head.status == 200:
                if notes.params is None:
                    raise UpstreamError(
                        "the engine's KV connector keeps nothing for others", stage="generate"
                    )
                yield KvHandle(notes.params)
            elif head is not None:
                yield head
        finally:
            self._answering.pop(request_id, None)
            await parts.aclose()
            await call.aclose()

    def _check_told(self, told: Told) -> None:
        """A token that the model has not would end the engine."""
        assert self._engine is not None
        size = self._engine.model_config.get_vocab_size()
        if any(not 0 <= token < size for group in told.tokens for token in group):
            raise BadRequestError(
                f"a token that was told is none of the model's {size}", stage="generate"
            )

    async def wake(self) -> None:
        if self._engine is not None and self.alive:
            # The cheapest message there is: the abort of a request that nobody has.
            await self._engine.engine_core.abort_requests_async([_NOBODY])

    async def reset_encoder_cache(self) -> None:
        """Have the engine forget all embeddings, as after a change of the model's weights."""
        if self._engine is not None:
            await self._engine.reset_encoder_cache()

    async def reset_prefix_cache(self) -> bool:
        """Have the engine forget what it keeps of prompts; False if it could not, as while it runs any."""
        return self._engine is not None and bool(await self._engine.reset_prefix_cache())

    async def stop(self) -> None:
        self._app = None
        await super().stop()
        self._reader.close()


def put_placeholders(
    route: str, body: dict[str, Any], placeholders: list[Placeholder], fingerprint: str
) -> None:
    """Put in place of each media reference what vLLM needs, and name the keys that the gate waits for."""
    if not placeholders:
        return
    make_part = _input_part if route == RESPONSES else _part
    for content in contents_of(route, body):
        if not isinstance(content, list):
            continue
        for place, part in enumerate(content):
            if isinstance(part, dict) and part.get("type") == "media_ref":
                content[place] = make_part(placeholders[part["item"]])
    keys = [item.key for item in placeholders]
    body["ec_transfer_params"] = managed_params(keys, fingerprint)


def _part(item: Placeholder) -> dict[str, Any]:
    """A content part of a chat that vLLM takes for an item whose embedding will come from elsewhere."""
    if item.media is not None:
        kind = f"{item.modality}_url"
        return {"type": kind, kind: {"url": make_data_uri(item.media)}, "uuid": item.key}
    kind = f"{item.modality}_embeds"
    # vLLM takes lists for the fields that it asks for itself, and all others as encoded arrays.
    fields = {
        name: value if isinstance(value, list) else _array(value)
        for name, value in item.metadata.items()
    }
    return {"type": kind, kind: fields, "uuid": item.key}


def _input_part(item: Placeholder) -> dict[str, Any]:
    """The same for an item of a response's input.

    The types of OpenAI's client, by which vLLM checks these, know no such part but let others' fields pass;
    and vLLM goes by a part's fields, whatever its type, where it has a ``uuid``.
    """
    part = _part(item) | {"type": "input_image", "detail": "auto"}
    if item.media is not None:
        part[f"{item.modality}_url"] = make_data_uri(item.media)  # there it is no object
    return part


def _array(number: float) -> str:
    buffer = io.BytesIO()
    numpy.save(buffer, numpy.array([number], numpy.float32))
    return base64.b64encode(buffer.getvalue()).decode()
