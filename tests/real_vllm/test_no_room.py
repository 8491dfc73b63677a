"""An embedding for which the arena has no room costs its own item, and not the engine that made it."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from epd_common.store.room import ArenaFullError

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # vLLM is loaded in this process
]


def test_the_connector_outlives_a_full_arena(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from epd_vllm import compat

    compat.prepare_environment()
    import torch

    from epd_vllm import connector as connector_module
    from epd_vllm.embedding_io import seal, write_staged

    def refuses(*_: object) -> None:
        raise ArenaFullError("no room")

    key = secrets.token_hex(32)
    connector = connector_module.EpdConnector.__new__(connector_module.EpdConnector)
    connector._staging, connector._dtype = tmp_path, torch.bfloat16
    with monkeypatch.context() as patched:
        patched.setattr(connector_module, "write_staged", refuses)
        connector._save(key, torch.ones(4, 8))
    with pytest.raises(ArenaFullError, match="EPD_ARENA_BYTES") as caught:
        seal(tmp_path / key, key=key, fingerprint="f", metadata={})
    assert caught.value.stage == "encode" and caught.value.key == key
    (tmp_path / key).unlink()
    write_staged(tmp_path, key, torch.ones(4, 8))
    assert seal(tmp_path / key, key=key, fingerprint="f", metadata={}).rows == 4
