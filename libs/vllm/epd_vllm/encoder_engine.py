"""The encoder engine: vLLM as ``ec_producer``, driven directly with one placeholder token an item."""

from __future__ import annotations

import asyncio
import itertools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd_common.engines import EngineInfo, OnSized, Progress, StagedEmbedding
from epd_common.errors import BadRequestError, UpstreamError
from epd_common.store.embedding import IntegrityError
from epd_vllm.embedding_io import seal
from epd_vllm.launch import engine_arguments, launch, shut_down
from epd_vllm.model import describe, model_folder

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)


class VllmEncoderEngine:
    """Runs the vision tower of a model.

    Args:
        staging: The arena's staging folder of this worker.
        extra_arguments: More engine arguments, as typed in a shell.
    """

    def __init__(
        self,
        *,
        model: str,
        served: str,
        revision: str,
        staging: Path,
        max_batch: int,
        extra_arguments: str = "",
    ) -> None:
        self._model = model
        self._served = served
        self._revision = revision
        self._staging = staging
        self._max_batch = max_batch
        self._extra = extra_arguments
        self._engine: AsyncLLM | None = None
        self._info: EngineInfo | None = None
        self._resolver: PlaceholderMetadataResolver | None = None
        self._placeholder = 0
        self._numbers = itertools.count()

    @property
    def alive(self) -> bool:
        return self._engine is not None and not self._engine.errored

    async def start(self, progress: Progress) -> EngineInfo:
        await asyncio.to_thread(model_folder, self._model)  # a clear error comes before a long load
        role = {
            "--model": self._model,
            "--served-model-name": self._served,
            "--max-num-seqs": str(self._max_batch),
            "--mm-encoder-only": None,
            "--no-enable-prefix-caching": None,
            "--disable-log-stats": None,
            "--limit-mm-per-prompt": '{"image": 1, "video": 0}',
            # The processor's own cache would keep pixels of media that are encoded once.
            "--mm-processor-cache-gb": "0",
            "--ec-transfer-config": _transfer_config(self._staging),
        }
        if self._revision:
            role["--revision"] = self._revision
        self._engine, _ = await launch(engine_arguments(role=role, extra=self._extra), progress)
        self._info = describe(
            self._engine, model=self._model, served=self._served, revision=self._revision
        )
        self._placeholder = int(self._engine.model_config.hf_config.image_token_id)
        self._resolver = await asyncio.to_thread(_resolver, self._engine.model_config)
        progress("ready")
        return self._info

    async def encode(
        self,
        key: str,
        data: bytes,
        modality: str,
        processor_args: dict[str, Any],
        on_sized: OnSized,
    ) -> StagedEmbedding:
        if self._engine is None or self._info is None:
            raise RuntimeError("the engine was not started")
        picture = await asyncio.to_thread(_load_picture, data)
        rendered = await self._render(key, picture, processor_args)
        if metadata := self._metadata(rendered):
            await on_sized(metadata)
        identifier, metadata = await self._run(key, rendered)
        path = self._staging / identifier
        try:
            header = await asyncio.to_thread(
                seal, path, key=key, fingerprint=self._info.fingerprint, metadata=metadata
            )
        except FileNotFoundError as error:
            raise UpstreamError(
                f"the engine encoded {key} but wrote no embedding", stage="encode", key=key
            ) from error
        except IntegrityError:
            path.unlink(missing_ok=True)
            raise
        return StagedEmbedding(path, header)

    async def _render(self, key: str, picture: Any, processor_args: dict[str, Any]) -> Any:
        """Have vLLM's renderer preprocess a picture; the result is what the engine takes."""
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        assert self._engine is not None
        prompt: dict[str, Any] = {
            "prompt_token_ids": [self._placeholder],
            "multi_modal_data": {"image": [picture]},
            "multi_modal_uuids": {"image": [key]},
        }
        if processor_args:
            prompt["mm_processor_kwargs"] = processor_args
        renderer = self._engine.renderer
        try:
            parsed = parse_model_prompt(self._engine.model_config, prompt)
            (rendered,) = await renderer.render_cmpl_async(
                [parsed], renderer.default_cmpl_tok_params
            )
        except (ValueError, TypeError) as error:
            raise _not_encodable(key, error) from error
        return rendered

    def _metadata(self, rendered: Any) -> dict[str, Any]:
        """What a consumer must know of a rendered item in place of its pixels.

        The same fields that the engine reports with the finished item; a consumer asks for exactly these.
        """
        import torch

        assert self._resolver is not None
        (item,) = rendered["mm_kwargs"]["image"]
        wanted = self._resolver.fields_for("image")
        return {
            name: torch.atleast_1d(value).tolist() if isinstance(value, torch.Tensor) else value
            for name, value in item.get_data().items()
            if name in wanted
        }

    async def _run(self, key: str, rendered: Any) -> tuple[str, dict[str, Any]]:
        """Have the engine encode a rendered item; the identifier it used and the item's metadata."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        assert self._engine is not None
        sampling = SamplingParams(
            max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        request_id = f"encode-{next(self._numbers)}"
        final = None
        try:
            async for output in self._engine.generate(rendered, sampling, request_id):
                final = output
        except EngineDeadError as error:
            raise UpstreamError("the encoder's engine died", stage="encode", key=key) from error
        except (ValueError, EngineGenerateError) as error:
            if isinstance(error, ValueError) or isinstance(error.__cause__, ValueError | TypeError):
                raise _not_encodable(key, error.__cause__ or error) from error
            raise UpstreamError(
                f"the encoder's engine failed: {error.__cause__ or error}", stage="encode", key=key
            ) from error
        items = (final.ec_transfer_params if final is not None else None) or {}
        if len(items) != 1:
            raise UpstreamError(
                f"the engine reported {len(items)} items for {key}", stage="encode", key=key
            )
        ((identifier, entry),) = items.items()
        return identifier, dict(entry["metadata"])

    async def stop(self) -> None:
        if self._engine is None:
            return
        await shut_down(self._engine)
        self._engine = None


def _not_encodable(key: str, reason: BaseException) -> BadRequestError:
    return BadRequestError(
        f"the model cannot take this picture: {reason}",
        code="media_not_encodable",
        stage="encode",
        key=key,
    )


def _resolver(config: ModelConfig) -> PlaceholderMetadataResolver:
    from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

    resolver = PlaceholderMetadataResolver(config)
    resolver.fields_for("image")  # builds a processor, which takes a while
    return resolver


def _load_picture(data: bytes) -> Any:
    """Decode as vLLM's own server does: EXIF turned, transparency on white, first frame."""
    from vllm.multimodal.media import ImageMediaIO

    try:
        return ImageMediaIO().load_bytes(data)
    except (ValueError, OSError) as error:
        raise BadRequestError(
            f"the picture cannot be decoded: {error}", code="invalid_image"
        ) from error


def _transfer_config(staging: Path) -> str:
    import json

    return json.dumps(
        {
            "ec_connector": "EpdConnector",
            "ec_connector_module_path": "epd_vllm.connector",
            "ec_role": "ec_producer",
            "ec_connector_extra_config": {"staging": str(staging)},
        }
    )
