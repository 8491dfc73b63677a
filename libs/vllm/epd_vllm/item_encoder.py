"""Encoding one item with an engine that has its towers: one placeholder, no template, no answer."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd_common.engines import OnSized, StagedEmbedding
from epd_common.errors import BadRequestError, UpstreamError
from epd_common.store.base import StoreFullError
from epd_common.store.embedding import IntegrityError
from epd_vllm.embedding_io import seal
from epd_vllm.media import MediaLoader

if TYPE_CHECKING:
    from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver
    from vllm.v1.engine.async_llm import AsyncLLM

_FORGOTTEN = ("second_per_grid_ts",)
"""Numbers that vLLM computes an item's positions with and does not ask its consumers for. Qwen2.5-VL would
take every video for one of a grid a second."""

_REASON_CHARACTERS = 300


class ItemEncoder:
    """Has an engine encode items into a staging folder, whatever its role.

    Args:
        engine: A loaded ``ec_producer`` or ``ec_both``.
        fingerprint: Of its model.
        staging: The folder that its connector writes to.
        modalities: Those that it may be given.
    """

    def __init__(
        self, engine: AsyncLLM, *, fingerprint: str, staging: Path, modalities: tuple[str, ...]
    ) -> None:
        self._engine = engine
        self._fingerprint = fingerprint
        self._staging = staging
        self._numbers = itertools.count()
        self._media = MediaLoader(engine.model_config)
        self._prompts = {name: _prompt(engine, name) for name in modalities}
        self._resolver = _resolver(engine, modalities)
        config = engine.vllm_config.ec_transfer_config
        self._generates = config is not None and config.is_ec_consumer
        self.running = 0
        """Items that are in the engine now."""

    async def encode(
        self,
        key: str,
        data: bytes,
        modality: str,
        processor_args: dict[str, Any],
        on_sized: OnSized,
    ) -> StagedEmbedding:
        """See ``epd_common.engines.EncoderEngine.encode``."""
        if modality not in self._prompts:
            raise BadRequestError(
                f"the model takes no {modality} input",
                code="modality_not_supported",
                stage="encode",
                key=key,
            )
        media = await self._media.load(modality, data)
        rendered = await self._render(key, modality, media, processor_args)
        metadata = self._metadata(key, modality, rendered)
        await on_sized(metadata)
        if self._generates:
            _cut_after_first_row(rendered, modality)
        (position,) = rendered["mm_placeholders"][modality]
        path = self._staging / await self._run(key, rendered)
        try:
            header = await asyncio.to_thread(
                seal,
                path,
                key=key,
                fingerprint=self._fingerprint,
                metadata=metadata,
                rows=position.get_num_embeds(),
            )
        except FileNotFoundError as error:
            raise UpstreamError(
                f"the engine encoded {key} but wrote no embedding", stage="encode", key=key
            ) from error
        except (IntegrityError, StoreFullError):
            path.unlink(missing_ok=True)
            raise
        return StagedEmbedding(path, header)

    async def _render(
        self, key: str, modality: str, media: Any, processor_args: dict[str, Any]
    ) -> Any:
        """Have vLLM's renderer preprocess an item; the result is what the engine takes."""
        from vllm.exceptions import VLLMClientError
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        prompt: dict[str, Any] = {
            "prompt_token_ids": list(self._prompts[modality]),
            "multi_modal_data": {modality: [media]},
            "multi_modal_uuids": {modality: [key]},
        }
        if processor_args:
            prompt["mm_processor_kwargs"] = processor_args
        renderer = self._engine.renderer
        try:
            parsed = parse_model_prompt(self._engine.model_config, prompt)
            (rendered,) = await renderer.render_cmpl_async(
                [parsed], renderer.default_cmpl_tok_params
            )
        except (ValueError, TypeError, VLLMClientError) as error:
            raise _not_encodable(key, error) from error
        return rendered

    def _metadata(self, key: str, modality: str, rendered: Any) -> dict[str, Any]:
        """What a consumer must know of a rendered item in place of its media; empty if it needs those.

        The fields that vLLM says its consumers need, and those that it forgets.
        """
        from vllm.distributed.ec_transfer.ec_connector.utils import collect_ec_item_metadata
        from vllm.multimodal.inputs import MultiModalFeatureSpec

        (item,) = rendered["mm_kwargs"][modality]
        (position,) = rendered["mm_placeholders"][modality]
        feature = MultiModalFeatureSpec(
            data=item, modality=modality, identifier=key, mm_position=position
        )
        metadata: dict[str, Any] = dict(
            collect_ec_item_metadata([feature], self._resolver)[key]["metadata"]
        )
        if metadata:
            fields = item.get_data()
            metadata |= {name: float(fields[name]) for name in _FORGOTTEN if name in fields}
        return metadata

    async def _run(self, key: str, rendered: Any) -> str:
        """Have the engine encode a rendered item; the name that it gave the embedding."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        sampling = SamplingParams(
            max_tokens=1,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_reading_prefix_cache=True,  # what is read from there is not encoded again
        )
        request_id = f"encode-{next(self._numbers)}"
        final = None
        self.running += 1
        try:
            async for output in self._engine.generate(rendered, sampling, request_id):
                final = output
        except EngineDeadError as error:
            raise UpstreamError("the encoder's engine died", stage="encode", key=key) from error
        except (ValueError, VLLMClientError) as error:
            raise _not_encodable(key, error) from error
        except EngineGenerateError as error:
            if isinstance(error.__cause__, ValueError | TypeError):
                raise _not_encodable(key, error) from error
            raise UpstreamError(
                f"the encoder's engine failed: {error.__cause__ or error}", stage="encode", key=key
            ) from error
        finally:
            self.running -= 1
        items = (final.ec_transfer_params if final is not None else None) or {}
        if len(items) != 1:
            raise UpstreamError(
                f"the engine reported {len(items)} items for {key}", stage="encode", key=key
            )
        (identifier,) = items
        return str(identifier)


def _prompt(engine: AsyncLLM, modality: str) -> list[int]:
    """The shortest prompt with one item: what vLLM itself profiles a model with."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    processor = MULTIMODAL_REGISTRY.create_processor(engine.model_config)
    text = processor.dummy_inputs.get_dummy_text({modality: 1})
    ids: list[int] = engine.get_tokenizer().encode(text, add_special_tokens=False)
    return ids


def _resolver(engine: AsyncLLM, modalities: tuple[str, ...]) -> PlaceholderMetadataResolver:
    from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

    resolver = PlaceholderMetadataResolver(engine.model_config)
    for modality in modalities:
        resolver.fields_for(modality)  # builds a processor, which takes a while
    return resolver


def _cut_after_first_row(rendered: Any, modality: str) -> None:
    """Leave one row of the item in the prompt.

    An item is encoded whole once any of its rows is to be prefilled, and an engine that also generates would
    prefill all of them.
    """
    (position,) = rendered["mm_placeholders"][modality]
    first = 0
    if position.is_embed is not None:
        first = int(position.is_embed.nonzero()[0])
    rendered["prompt_token_ids"] = rendered["prompt_token_ids"][: position.offset + first + 1]


def _not_encodable(key: str, error: BaseException) -> BadRequestError:
    while error.__cause__ is not None:  # what is around it holds the item's values
        error = error.__cause__
    reason = str(error).partition(" on data={")[0][:_REASON_CHARACTERS]
    return BadRequestError(
        f"the model cannot take this item: {reason or type(error).__name__}",
        code="media_not_encodable",
        stage="encode",
        key=key,
    )
