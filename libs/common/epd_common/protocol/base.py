"""The form that all messages share."""

from __future__ import annotations

import msgspec

VERSION = 1
"""Schema version of every message here. A consumer refuses another one with a clear error."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False, tag_field="t"):
    """A MessagePack map with ``t`` (which message) and ``v`` (schema version).

    Unknown fields are ignored, so that a newer sender may add some within one version.
    """

    v: int = VERSION


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A map inside a message; it has no version of its own."""
