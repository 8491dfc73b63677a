"""One PD process, from its connections to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

from epd_common.backlog import Backlog
from epd_common.bus import Bus, Registry
from epd_common.bus.exhausted import burying_exhausted
from epd_common.connections import connect
from epd_common.encode import EncodeHandler
from epd_common.engines import PdEngine
from epd_common.ingest import Ingest, PictureChecker
from epd_common.orders import Orders
from epd_common.protocol import subjects
from epd_common.store import Arena, SizeTable
from epd_pd.admission import Admission
from epd_pd.answering import Answering
from epd_pd.cancels import Cancels
from epd_pd.handing_over import HandingOver
from epd_pd.holdings import telling_what_is_held
from epd_pd.jobs import GenerateHandler
from epd_pd.loading import Loading
from epd_pd.local_encode import LocalEncode
from epd_pd.metrics import PdMetrics
from epd_pd.other_places import looking_into_other_places
from epd_pd.pins import Pins
from epd_pd.readiness import Readiness
from epd_pd.replays import Replays
from epd_pd.requesters import ending_with_requesters
from epd_pd.resuming import Resuming
from epd_pd.settings import PdSettings


class PdService:
    """Connects, loads the engine, works until it is told to stop, and gives back what it did not do.

    Args:
        make_engine: Builds the engine for this worker's folders in the arena.
    """

    def __init__(self, settings: PdSettings, make_engine: Callable[[Arena], PdEngine]) -> None:
        self._settings = settings
        self._make_engine = make_engine

    async def run(self, stop: asyncio.Event) -> None:
        settings = self._settings
        async with AsyncExitStack() as stack:
            parts = await connect(
                stack,
                settings,
                role="pd",
                slots=settings.pd_slots,
                stop=stop,
                pd_role=settings.pd_role,
            )
            cancels = await stack.enter_async_context(
                Cancels(parts.bus, parts.redis, worker=settings.worker_id)
            )
            replays = await stack.enter_async_context(Replays(parts.bus))
            resuming = await stack.enter_async_context(Resuming(parts.bus, cancels))
            engine = self._make_engine(parts.arena)
            stack.push_async_callback(parts.worker.stop_engine)
            takes_encodes = settings.ec_role == "ec_both"
            info = await parts.worker.load(engine, takes_encodes=takes_encodes)
            encoding = parts.encoding(engine, info)
            registry = await stack.enter_async_context(Registry(parts.bus))

            limits = settings.ingest_limits()
            pictures = await stack.enter_async_context(PictureChecker(limits))
            counters = parts.worker.counters
            await stack.enter_async_context(
                ending_with_requesters(
                    registry,
                    cancels,
                    own=subjects.worker_key("pd", settings.worker_id),
                    noted=lambda ended: counters.update(orphaned=ended),
                )
            )
            pins = Pins(parts.arena, parts.remote, info=info, counters=counters)
            parts.worker.shows("pins", pins.report)
            parts.worker.shows("frames", replays.report)
            admission = Admission(settings.max_incomplete)
            metrics = PdMetrics(parts.worker.metrics)
            answering = Answering(
                engine=engine,
                info=info,
                # URLs are the gateway's to fetch, under its limits; here media come inline.
                ingest=Ingest(parts.media, pictures, limits, fetch=None, files=parts.media),
                media=parts.media,
                readiness=Readiness(
                    parts.bus,
                    Orders(parts.bus, parts.states, parts.media),
                    pins,
                    SizeTable(parts.redis, info.fingerprint),
                    policy=settings.rescue_policy(encodes_here=info.encodes),
                    local=LocalEncode(encoding, parts.states) if info.encodes else None,
                    encoders_alive=lambda: registry.takes_encodes(settings.model_name),
                    recheck_s=settings.recheck_s,
                    store_patience_s=settings.store_patience_s,
                    counters=counters,
                    max_item_rows=info.max_item_rows,
                ),
                admission=admission,
                resuming=resuming,
                long_wait_s=settings.prefill_wait_s,
                tells_kept=settings.kv_events,
                loading=Loading(
                    engine,
                    prefill_alive=partial(_alive, registry),
                    metrics=metrics,
                    counters=counters,
                ),
                handing_over=self._handing_over(parts.bus, registry),
                counters=counters,
                metrics=metrics,
            )
            if settings.kv_events and settings.pd_role != "decode":
                await stack.enter_async_context(
                    telling_what_is_held(parts.bus, engine.kept, worker=settings.worker_id)
                )
            backlog = Backlog()
            handler = GenerateHandler(
                bus=parts.bus,
                answering=answering,
                model=info.model,
                cancels=cancels,
                replays=replays,
                worker=settings.worker_id,
                node=settings.node,
                tracer=parts.tracer,
                backlog=backlog,
                deadline_s=settings.deadline_s,
                counters=counters,
                metrics=metrics,
            )
            await stack.enter_async_context(
                burying_exhausted(parts.bus, "generate", handler.exhausted)
            )
            decodes = settings.pd_role == "decode"
            generate = await parts.pull(
                stack,
                "generate",
                slots=settings.pd_slots,
                # Who has nothing to prefill is loaded by the answers that it tells.
                load=None if decodes else lambda: backlog.level,
                place=subjects.DECODE_PLACE if decodes else subjects.ANY_PLACE,
            )
            if not decodes:
                await stack.enter_async_context(
                    looking_into_other_places(
                        parts.bus,
                        generate,
                        registry,
                        model=settings.model_name,
                        worker=settings.worker_id,
                        counters=counters,
                    )
                )
            metrics.show(counters, admission=admission, backlog=backlog, puller=generate)
            queues = [(generate, handler.handle, handler.exhausted)]
            if takes_encodes:
                encodes = EncodeHandler(encoding, counters)
                await stack.enter_async_context(
                    burying_exhausted(parts.bus, "encode", encodes.exhausted)
                )
                encode = await parts.pull(
                    stack, "encode", slots=settings.encoder_slots, ahead_s=settings.encode_ahead_s
                )
                queues.append((encode, encodes.handle, encodes.exhausted))
            await parts.worker.work(queues, stop)

    def _handing_over(self, bus: Bus, registry: Registry) -> HandingOver | None:
        settings = self._settings
        if settings.pd_role != "prefill":
            return None
        return HandingOver(
            bus,
            policy=settings.split_policy(),
            decoders=lambda: bool(registry.decoding(settings.model_name)),
            lease_s=settings.kv_lease_s,
            worker=settings.worker_id,
        )


def _alive(registry: Registry, worker: str) -> bool:
    view = registry.view(subjects.worker_key("pd", worker))
    return view is not None and view.alive
