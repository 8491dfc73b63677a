"""Embeddings between torch and the arena's files."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import Any

import torch

from epd_common.store.embedding import (
    HEADER_BYTES,
    EmbeddingHeader,
    IntegrityError,
    pack_header,
    payload_checksum,
    unpack_header,
)
from epd_common.store.room import ArenaFullError, write_whole


def write_staged(folder: Path, name: str, tensor: torch.Tensor) -> None:
    """Write a 2-D tensor with a header that is not sealed yet, visible by rename once it is whole.

    Raises:
        ArenaFullError: there is no room for it.
    """
    tensor = tensor.detach().to("cpu").contiguous()
    header = EmbeddingHeader(
        key=name,
        rows=tensor.shape[0],
        width=tensor.shape[1],
        dtype=str(tensor.dtype).removeprefix("torch."),
    )
    temporary = folder / f".{name}"
    values = memoryview(tensor.view(torch.uint8).numpy().reshape(-1))
    write_whole(temporary, pack_header(header), values, key=name)
    os.rename(temporary, folder / name)


def mark_refused(folder: Path, name: str) -> None:
    """Leave an empty file in the place of an embedding for which there was no room, to tell who seals."""
    with contextlib.suppress(OSError):  # then that one finds nothing, which is an error as well
        (folder / name).touch()


def device() -> torch.device:
    """The device of this worker's rank."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike():
        return torch.device(current_platform.device_type, current_platform.current_device())
    return torch.device(current_platform.device_type)


def map_tensor(path: Path) -> torch.Tensor:
    """Map an embedding as a tensor without copying it; the mapping lives as long as the tensor.

    Raises:
        IntegrityError: the file is not the embedding that its header says.
        FileNotFoundError: it is not there.
    """
    header, mapped = _map(path)
    dtype = getattr(torch, header.dtype)
    values = torch.frombuffer(mapped, dtype=dtype, offset=HEADER_BYTES)
    return values.reshape(header.rows, header.width)


def read_header(path: Path) -> EmbeddingHeader:
    """The header of a file whose size agrees with it; two system calls, no payload is read.

    Raises:
        IntegrityError: size and header disagree.
        FileNotFoundError: it is not there.
    """
    with open(path, "rb", buffering=0) as file:
        header = unpack_header(file.read(HEADER_BYTES))
        size = os.fstat(file.fileno()).st_size
    if size != header.file_bytes:
        raise IntegrityError(f"{path.name} has {size} bytes, its header says {header.file_bytes}")
    return header


def seal(
    path: Path, *, key: str, fingerprint: str, metadata: dict[str, Any], rows: int | None = None
) -> EmbeddingHeader:
    """Verify a staged embedding and return the complete header for it.

    Args:
        rows: For which a prompt has room.

    Raises:
        IntegrityError: a value is not finite, it has other rows, or the file is not what its header says.
        ArenaFullError: it could not be written.
        FileNotFoundError: it was not.
    """
    if not path.stat().st_size:
        raise ArenaFullError(
            f"the arena had no room for the embedding {key}; give its tmpfs more room or lower "
            "EPD_ARENA_BYTES",
            stage="encode",
            key=key,
        )
    tensor = map_tensor(path)
    if not bool(torch.isfinite(tensor).all()):
        raise IntegrityError(
            f"the encoder gave values that are not finite for {key}", code="not_finite", key=key
        )
    header, mapped = _map(path)
    if rows is not None and header.rows != rows:
        raise IntegrityError(
            f"the encoder gave {header.rows} rows for {key}, and its place in a prompt has {rows}",
            key=key,
        )
    with memoryview(mapped) as view:
        checksum = payload_checksum(view[HEADER_BYTES:])
    return EmbeddingHeader(
        key=key,
        rows=header.rows,
        width=header.width,
        dtype=header.dtype,
        fingerprint=fingerprint,
        metadata=metadata,
        checksum=checksum,
    )


def _map(path: Path) -> tuple[EmbeddingHeader, mmap.mmap]:
    header = read_header(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Copy-on-write, as torch wants a buffer that it could write to.
        return header, mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
