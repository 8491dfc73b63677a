"""Where bytes are kept: embeddings (arena, Redis), media, and the state of every key.

``Embedding`` is one embedding with its header; an ``EmbeddingStore`` keeps them. The arena is also the
only place from which an engine reads, by pins.
"""

from epd_common.store.arena import Arena
from epd_common.store.base import EmbeddingStore, StoreFullError
from epd_common.store.embedding import Embedding, EmbeddingHeader, IntegrityError
from epd_common.store.ledger import Ledger
from epd_common.store.media import MediaStore, StoredFile, UploadedFile
from epd_common.store.quotas import MediaQuotas
from epd_common.store.redis_client import open_redis
from epd_common.store.redis_store import RedisEmbeddingStore
from epd_common.store.remote import RemoteStore
from epd_common.store.room import ArenaFullError
from epd_common.store.sizes import SizeTable, SizeTables
from epd_common.store.states import Claim, KeyStates, UnwantedError, Waiter
from epd_common.store.suspects import Suspects

__all__ = [
    "Arena",
    "ArenaFullError",
    "Claim",
    "Embedding",
    "EmbeddingHeader",
    "EmbeddingStore",
    "IntegrityError",
    "KeyStates",
    "Ledger",
    "MediaQuotas",
    "MediaStore",
    "RedisEmbeddingStore",
    "RemoteStore",
    "SizeTable",
    "SizeTables",
    "StoreFullError",
    "StoredFile",
    "Suspects",
    "UnwantedError",
    "UploadedFile",
    "Waiter",
    "open_redis",
]
