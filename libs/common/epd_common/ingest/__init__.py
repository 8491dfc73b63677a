"""Ingest: reads, checks and stores the media of a request, and puts references in their place."""

from epd_common.decoding.pictures import Picture
from epd_common.ingest.limits import IngestLimits
from epd_common.ingest.media import Fetch, FetchedMedia, FileLookup, MediaStore
from epd_common.ingest.pictures import PictureChecker
from epd_common.ingest.pipeline import Ingest, Prepared
from epd_common.store.media import StoredFile

__all__ = [
    "Fetch",
    "FetchedMedia",
    "FileLookup",
    "Ingest",
    "IngestLimits",
    "MediaStore",
    "Picture",
    "PictureChecker",
    "Prepared",
    "StoredFile",
]
