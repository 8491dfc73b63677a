"""The PD engine: vLLM as ``ec_consumer``, answering through its own OpenAI application in-process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from epd_common.engines import AnswerHead, EngineInfo, Placeholder, Progress
from epd_vllm.compat import vllm_version
from epd_vllm.gate import managed_params
from epd_vllm.launch import engine_arguments, launch, shut_down
from epd_vllm.model import describe, model_folder, needs_vision_tower
from epd_vllm.openai_app import OpenAIApp

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


CACHE_MANAGER = "epd_vllm.cache_manager.GatedEncoderCacheManager"
SCHEDULER = "epd_vllm.scheduler.GatedScheduler"
ASYNC_SCHEDULER = "epd_vllm.scheduler.GatedAsyncScheduler"
_NOBODY = "epd-wake"


class VllmPdEngine:
    """Runs prefill and decode of a model; it never sees pixels.

    Args:
        pins: The arena's pin folder of this worker.
        sleep_when_stalled: Let the engine's process sleep while all its requests wait for embeddings.
        extra_arguments: More engine arguments, as typed in a shell.
    """

    def __init__(
        self,
        *,
        model: str,
        served: str,
        revision: str,
        pins: Path,
        max_batch: int,
        max_items: int,
        sleep_when_stalled: bool = True,
        extra_arguments: str = "",
    ) -> None:
        self._model = model
        self._served = served
        self._revision = revision
        self._pins = pins
        self._max_batch = max_batch
        self._max_items = max_items
        self._sleep_when_stalled = sleep_when_stalled
        self._extra = extra_arguments
        self._engine: AsyncLLM | None = None
        self._fingerprint = ""
        self._app: OpenAIApp | None = None

    @property
    def alive(self) -> bool:
        return self._engine is not None and not self._engine.errored

    async def start(self, progress: Progress) -> EngineInfo:
        folder = await asyncio.to_thread(model_folder, self._model)
        # No tower is loaded where the model can do without, and then no picture can reach it either.
        images = self._max_items if needs_vision_tower(folder) else 0
        role = {
            "--model": self._model,
            "--served-model-name": self._served,
            "--max-num-seqs": str(self._max_batch),
            "--disable-log-stats": None,
            "--disable-uvicorn-access-log": None,
            "--enable-mm-embeds": None,
            "--limit-mm-per-prompt": json.dumps({"image": images, "video": 0}),
            "--ec-transfer-config": json.dumps(
                {
                    "ec_connector": "EpdConnector",
                    "ec_connector_module_path": "epd_vllm.connector",
                    "ec_role": "ec_consumer",
                    "ec_connector_extra_config": {
                        "pins": str(self._pins),
                        "sleep_when_stalled": self._sleep_when_stalled,
                    },
                }
            ),
            "--ec-manager-config": json.dumps({"encoder_cache_manager_cls": CACHE_MANAGER}),
            "--scheduler-cls": SCHEDULER if vllm_version()[1] else ASYNC_SCHEDULER,
        }
        if self._revision:
            role["--revision"] = self._revision
        self._engine, parsed = await launch(
            engine_arguments(role=role, extra=self._extra), progress
        )
        self._app = await OpenAIApp.build(self._engine, parsed)
        info = describe(
            self._engine, model=self._model, served=self._served, revision=self._revision
        )
        self._fingerprint = info.fingerprint
        progress("ready")
        return info

    async def answer(
        self, request_id: str, route: str, body: dict[str, Any], placeholders: list[Placeholder]
    ) -> AsyncGenerator[AnswerHead | bytes, None]:
        if self._app is None:
            raise RuntimeError("the engine was not started")
        put_placeholders(body, placeholders, self._fingerprint)
        call = self._app.call(route, msgspec.json.encode(body), request_id=request_id)
        head: AnswerHead | None = None
        try:
            async for part in call:
                if isinstance(part, AnswerHead):
                    head = part  # vLLM sends a stream's before it knows whether there will be one
                    continue
                if head is not None:
                    yield head
                    head = None
                yield part
            if head is not None:
                yield head
        finally:
            await call.aclose()

    async def wake(self) -> None:
        if self._engine is not None and self.alive:
            # The cheapest message there is: the abort of a request that nobody has.
            await self._engine.engine_core.abort_requests_async([_NOBODY])

    async def stop(self) -> None:
        if self._engine is None:
            return
        await shut_down(self._engine)
        self._engine = None
        self._app = None


def put_placeholders(
    body: dict[str, Any], placeholders: list[Placeholder], fingerprint: str
) -> None:
    """Replace each media reference by metadata alone, and name the keys that the gate waits for."""
    if not placeholders:
        return
    for message in body["messages"]:
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for place, part in enumerate(content):
            if isinstance(part, dict) and part.get("type") == "media_ref":
                item = placeholders[part["item"]]
                content[place] = {
                    "type": "image_embeds",
                    "image_embeds": item.metadata,
                    "uuid": item.key,
                }
    keys = [item.key for item in placeholders]
    body["ec_transfer_params"] = managed_params(keys, fingerprint)
