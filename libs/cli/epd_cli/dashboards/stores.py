"""How full are the arenas, what is reused, what is lost?"""

from __future__ import annotations

from epd_cli.dashboards.panel import Panel, per_s

STORES = (
    Panel(
        "Arenas",
        "A full one evicts what was not used for longest, which is as it should be.",
        (
            ("max by (node) (epd_store_arena_used_bytes)", "{{node}}: used"),
            ("max by (node) (epd_store_arena_quota_bytes)", "{{node}}: quota"),
        ),
        "bytes",
    ),
    Panel(
        "Bytes of embeddings",
        "Written to and read from each store; what is read from the arena is mapped, not copied.",
        ((per_s("epd_store_embedding_bytes_total", "store, way"), "{{store}} {{way}}"),),
        "Bps",
    ),
    Panel(
        "Embeddings",
        "The same in embeddings.",
        ((per_s("epd_store_embedding_items_total", "store, way"), "{{store}} {{way}}"),),
        "ops",
    ),
    Panel(
        "Items of requests, by origin",
        "Encoded for the request, shared with an encode under way (single flight), or reused from a store.",
        ((per_s("epd_gateway_items_total", "origin"), "{{origin}}"),),
        "ops",
    ),
    Panel(
        "Encodes saved",
        "Share of items that were shared or reused.",
        (
            (
                '(sum(rate(epd_gateway_items_total{origin=~"shared|reused"}[$__rate_interval])) or vector(0))'
                f" / {per_s('epd_gateway_items_total')}",
                "saved",
            ),
        ),
        "percentunit",
    ),
    Panel(
        "Encode jobs by outcome",
        "Hit: it was there already. Stale and unwanted ones cost no encode.",
        ((per_s("epd_encoder_items_total", "outcome"), "{{outcome}}"),),
        "ops",
    ),
    Panel(
        "Evicted",
        "Embeddings that made room for others.",
        ((per_s("epd_store_evicted_items_total", "store"), "{{store}}"),),
        "ops",
    ),
    Panel(
        "Lost",
        "Announced, and gone when they were wanted: each is encoded again. More than a few: the stores are "
        "too small.",
        ((per_s("epd_pd_lost_items_total"), "lost"),),
        "ops",
    ),
    Panel(
        "Tenants over their bytes",
        "Media and bodies that were refused.",
        ((per_s("epd_gateway_media_refused_total", "tenant"), "{{tenant}}"),),
        "ops",
        where="faults",
    ),
)
