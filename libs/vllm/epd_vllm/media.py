"""Decoding media for an encoder, just as vLLM's own server would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from epd_common.errors import BadRequestError

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_NAMES = {"image": "picture", "video": "video", "audio": "recording"}


class MediaLoader:
    """Turns the bytes of a picture, video or recording into what vLLM's processors take.

    Pictures are turned by their EXIF data, transparency is shown on white, of an animation the first frame is
    taken; videos are sampled, recordings decoded at their own rate. ``--media-io-kwargs`` in the engine's
    arguments counts, as it does for vLLM's server.
    """

    def __init__(self, config: ModelConfig) -> None:
        from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, VideoMediaIO
        from vllm.multimodal.video import get_video_loader_backend_for_processor
        from vllm.transformers_utils.processor import get_video_processor_cls_name

        multimodal = config.multimodal_config
        options = dict((multimodal.media_io_kwargs if multimodal else None) or {})
        image = ImageMediaIO(**options.get("image", {}))
        video = dict(options.get("video", {}))
        if "video_backend" not in video and (
            backend := get_video_loader_backend_for_processor(get_video_processor_cls_name(config))
        ):
            video["video_backend"] = backend
        self._readers: dict[str, Any] = {
            "image": image,
            "video": VideoMediaIO(image, **video),
            "audio": AudioMediaIO(**options.get("audio", {})),
        }

    def load(self, modality: str, data: bytes) -> Any:
        """Decode; takes long, so call it in a thread.

        Raises:
            BadRequestError: the bytes are not what they should be.
        """
        try:
            return self._readers[modality].load_bytes(data)
        except Exception as error:  # decoders raise nearly anything on hostile bytes
            reason = str(error)[:200] or type(error).__name__
            if isinstance(error, ImportError):  # the last of vLLM's decoders is not installed
                reason = "no decoder that is installed here reads it"
            raise BadRequestError(
                f"the {_NAMES[modality]} cannot be decoded: {reason}",
                code=f"invalid_{modality}",
                stage="encode",
            ) from error
