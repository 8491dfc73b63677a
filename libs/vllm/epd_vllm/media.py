"""Decoding media for an encoder, just as vLLM's own server would."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from epd_common.errors import BadRequestError

if TYPE_CHECKING:
    from vllm.config import ModelConfig

DECODERS = 2
"""Items that are decoded at once."""

MIN_RATE, MAX_RATE = 1_000, 384_000
"""Hz that a recording may have."""

MAX_FILTER = 1 << 23
"""Values in the filter of vLLM's resampler, at most: 64 MiB."""

MAX_SAMPLED = 768
"""Frames that vLLM's readers take of a video, at most."""

MAX_VIDEO_PIXELS = 1_000_000_000
"""Pixels of all frames that are taken of a video: 3 GB."""

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
        self._rate = _audio_rate(config)
        # Decoding takes long, and must not take the threads that everything else needs.
        self._threads = ThreadPoolExecutor(DECODERS, thread_name_prefix="epd-media")

    async def load(self, modality: str, data: bytes) -> Any:
        """Decode.

        Raises:
            BadRequestError: the bytes are not what they should be, or would take too much memory.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._load, modality, data)

    def _load(self, modality: str, data: bytes) -> Any:
        if modality == "video":
            _check_video(data)
        try:
            media = self._readers[modality].load_bytes(data)
        except Exception as error:  # decoders raise nearly anything on hostile bytes
            reason = str(error)[:200] or type(error).__name__
            if isinstance(error, ImportError):  # the last of vLLM's decoders is not installed
                reason = "no decoder that is installed here reads it"
            elif isinstance(error, ArithmeticError | LookupError):
                reason = "it has too few frames or none"
            raise _invalid(modality, reason) from error
        return self._resampled(*media) if modality == "audio" else media

    def _resampled(self, samples: Any, rate: float) -> tuple[Any, float]:
        """A recording as vLLM may resample it.

        vLLM's resampler builds a filter for each ratio of rates; for an odd one, such as 44,101 Hz to 16 kHz,
        that takes gigabytes. Such a recording is brought to the model's rate here, by FFmpeg's resampler.
        """
        import numpy
        from vllm.multimodal.audio import resample_audio_pyav

        if not bool(numpy.isfinite(samples).all()):
            raise _invalid("audio", "it has samples that are not finite")
        if not MIN_RATE <= rate <= MAX_RATE:
            raise _invalid("audio", f"its rate is {rate:g} Hz, not {MIN_RATE} to {MAX_RATE}")
        if self._rate is None or rate == self._rate:
            return samples, rate
        common = math.gcd(int(rate), int(self._rate))
        if int(rate) * int(self._rate) // common**2 <= MAX_FILTER:
            return samples, rate
        resampled = resample_audio_pyav(samples, orig_sr=int(rate), target_sr=int(self._rate))
        return resampled, self._rate


def _audio_rate(config: ModelConfig) -> float | None:
    """The rate in Hz to which vLLM resamples recordings for a model, if it takes any."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    parser = MULTIMODAL_REGISTRY.create_processor(config).info.data_parser
    rate: float | None = parser.audio_resampler.target_sr
    return rate


def _check_video(data: bytes) -> None:
    """Look at a video's frames before they are decoded.

    Raises:
        BadRequestError: decoded it would take too much memory.
    """
    import cv2
    from vllm.multimodal.video_decoders.opencv import OpenCVVideoBackendMixin

    try:
        capture = OpenCVVideoBackendMixin.open_video_capture(data)
    except Exception as error:
        raise _invalid("video", str(error)[:200] or type(error).__name__) from error
    # Not released by hand: that drops the reference to the data without Python's lock, and ends the process.
    frames = capture.get(cv2.CAP_PROP_FRAME_COUNT)
    width = capture.get(cv2.CAP_PROP_FRAME_WIDTH)
    height = capture.get(cv2.CAP_PROP_FRAME_HEIGHT)
    pixels = min(max(frames, 1), MAX_SAMPLED) * width * height
    if pixels > MAX_VIDEO_PIXELS:
        raise _invalid(
            "video",
            f"{frames:.0f} frames of {width:.0f} x {height:.0f} px are too many pixels; at most "
            f"{MAX_VIDEO_PIXELS} are taken, counting {MAX_SAMPLED} frames",
        )


def _invalid(modality: str, reason: str) -> BadRequestError:
    return BadRequestError(
        f"the {_NAMES[modality]} cannot be used: {reason}",
        code=f"invalid_{modality}",
        stage="encode",
    )
