"""Making embeddings: what encoders do with their jobs, and a PD worker that encodes an item itself."""

from epd_common.encode.jobs import EncodeHandler
from epd_common.encode.work import Encoding

__all__ = ["EncodeHandler", "Encoding"]
