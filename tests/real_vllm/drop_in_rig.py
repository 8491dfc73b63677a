"""Hooks of ``ArenaConnector`` in situations that no engine gets into on demand; prints what happened as JSON.

    python drop_in_rig.py MODEL ARENA

A program of its own, as it imports vLLM. No engine is started: the hooks are called as vLLM does.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from epd_vllm.compat import prepare_environment

QUOTA_BYTES = 1 << 17


def main(model: str, arena: str) -> dict[str, Any]:
    prepare_environment()
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

    from epd_vllm.drop_in import ArenaConnector

    rig = Rig(model, arena)
    return {
        "publishing": rig.publishing(),
        "a load that fails": rig.failing_load(),
        "refused settings": rig.refused(),
        "hooks": [
            name
            for name, hook in vars(ArenaConnector).items()
            if not name.startswith("_")
            and list(inspect.signature(hook).parameters)
            != list(inspect.signature(getattr(ECConnectorBase, name)).parameters)
        ],
    }


class Rig:
    def __init__(self, model: str, arena: str) -> None:
        self._model = model
        self._arena = arena

    def publishing(self) -> dict[str, Any]:
        """What is published of embeddings that are fine, not finite, too large, and there already."""
        import torch

        worker = self._connector("WORKER", "ec_producer")
        published = Path(self._arena, "data")
        counts = {}
        cache = {
            "fine": torch.ones(4, 128),
            "not finite": torch.full((4, 128), float("nan")),
            "too large": torch.ones(1024, 128),
            "of another dtype": torch.ones(4, 128, dtype=torch.float16),
        }
        for name in cache:
            worker.save_caches(cache, name)
            counts[name] = len(list(published.iterdir()))
        (file, *_) = published.iterdir()
        file.unlink()
        from epd_vllm.drop_in import ArenaStep

        worker.bind_connector_metadata(ArenaStep(saves=[*cache, "unknown"]))
        worker.start_save_caches(encoder_cache=cache)
        counts["published again"] = len(list(published.iterdir()))
        staged = [path for path in Path(self._arena, "staging").glob("*/*")]
        worker.shutdown()
        return {**counts, "staged": len(staged)}

    def failing_load(self) -> dict[str, Any]:
        """A worker cannot load what the scheduler had verified; later it can."""
        import torch

        producer = self._connector("WORKER", "ec_producer")
        values = torch.arange(512.0).reshape(4, 128)
        producer.save_caches({"item": values}, "item")
        scheduler = self._connector("SCHEDULER", "ec_consumer")
        worker = self._connector("WORKER", "ec_consumer")
        cache: dict[str, torch.Tensor] = {}
        told = {}

        first = _request("first")
        _until_available(scheduler, first)
        scheduler.update_state_after_alloc(first, 0)
        step = scheduler.build_connector_meta(_step(4))
        (path, _) = step.loads["item"]
        hidden = Path(path).rename(Path(path).with_suffix(".hidden"))
        told["report"] = self._work(worker, scheduler, step, cache)
        told["zeros"] = bool((cache["item"] == 0).all()) and cache["item"].shape == (4, 128)
        told["unavailable"] = sorted(scheduler.take_unavailable_requests())
        hidden.rename(path)
        scheduler.request_finished(first)

        # The engine's own cache has the item by now, so it is not allocated again.
        second = _request("second")
        _until_available(scheduler, second)
        told["nothing scheduled"] = list(scheduler.build_connector_meta(_step(0)).loads)
        _until_available(scheduler, second)
        step = scheduler.build_connector_meta(_step(4))
        told["report of the second"] = self._work(worker, scheduler, step, cache)
        told["right"] = bool((cache["item"] == values).all())
        told["unavailable then"] = sorted(scheduler.take_unavailable_requests())
        _until_available(scheduler, second)
        told["third load"] = list(scheduler.build_connector_meta(_step(4)).loads)
        for connector in (producer, scheduler, worker):
            connector.shutdown()
        return told

    @staticmethod
    def _work(worker: Any, scheduler: Any, step: Any, cache: dict[str, Any]) -> bool:
        """A step of a consumer's worker; whether it reported a failure."""
        worker.bind_connector_metadata(step)
        worker.start_load_caches(cache)
        report = worker.build_connector_worker_meta()
        scheduler.update_connector_output(SimpleNamespace(ec_connector_worker_meta=report))
        return report is not None

    def refused(self) -> list[str]:
        refused = []
        for extra, change in (
            ({"arena_bytes": 10}, {}),
            ({"arena": "/x"}, {}),
            ({"wait_s": "long"}, {}),
            ({}, {"mm_processor_cache_type": "shm"}),
        ):
            try:
                self._connector("SCHEDULER", "ec_consumer", extra, **change)
            except ValueError as error:
                refused.append(str(error))
        return refused

    def _connector(
        self, role: str, ec_role: str, extra: dict[str, Any] | None = None, **change: Any
    ) -> Any:
        from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
        from vllm.engine.arg_utils import EngineArgs

        from epd_vllm.drop_in import ArenaConnector

        settings = {"arena_dir": self._arena, "arena_bytes": QUOTA_BYTES, **(extra or {})}
        arguments = EngineArgs(
            model=self._model,
            dtype="float32",
            ec_transfer_config={
                "ec_connector": "ArenaConnector",
                "ec_connector_module_path": "epd_vllm.drop_in",
                "ec_role": ec_role,
                "ec_connector_extra_config": settings,
            },
            **change,
        )
        return ArenaConnector(arguments.create_engine_config(), ECConnectorRole[role])


def _request(request_id: str) -> Any:
    """A request with one item of four placeholders and no pixels."""
    position = SimpleNamespace(offset=3, length=4, get_num_embeds=lambda: 4)
    feature = SimpleNamespace(identifier="item", modality="image", data=None, mm_position=position)
    return SimpleNamespace(request_id=request_id, mm_features=[feature])


def _step(tokens: int) -> Any:
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens, free_encoder_mm_hashes=[], scheduled_new_reqs=[]
    )


def _until_available(scheduler: Any, request: Any) -> None:
    while not scheduler.ensure_cache_available(request, 0):
        assert not scheduler.take_unavailable_requests()


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
