"""Embeddings in registered memory of the process that made them, which others read one-sided by NIXL.

``NixlStore`` is both sides: what a worker encodes it keeps in a region of its own, under leases
(``slots.py``); what another one keeps it reads straight into a file of its node's arena (``landing.py``).
Who is who stands in Valkey (``peers.py``). Nothing here is imported where the store is not used, as the
package ``nixl`` is optional.
"""

from epd_common.store.nixl.store import NixlOptions, NixlStore, open_nixl

__all__ = ["NixlOptions", "NixlStore", "open_nixl"]
