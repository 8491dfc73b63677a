"""What each role may do on Valkey or Redis: its keys and the commands it needs for them, and no others.

``epd up`` gives them to the services it starts; ``deploy/valkey/users.conf`` is made from them. Each selector
(in parentheses) is a right of its own: these commands, on these keys. A script's commands are judged like
all others.
"""

from __future__ import annotations

from collections.abc import Callable

CONNECT = "-@all +auth +hello +ping +select +client|setinfo"
_SCRIPTS = "+script|load +time"  # they concern no key

_STATES = "(~epd:v1:state:* ~epd:v1:waiting:* +evalsha +hget +hmget +hset +del +pexpire +zcount)"
_WAITING = "(~epd:v1:waiting:* +zadd +zrem +pttl)"

_LEDGER = "(~epd:v1:open:* +evalsha +zadd +zrem +zrangebyscore +hget +hgetall +hset +hdel +hincrby +pexpire)"

_KEPT = "~epd:v1:media:* ~epd:v1:file:* ~epd:v1:body:*"
_QUOTAS = (
    "+info",  # maxmemory
    f"(~epd:v1:held:* {_KEPT} +evalsha +pexpireat)",
    "(~epd:v1:held:* +zadd +zrem +zscore +zrange +zrangebyscore +hget +hmget +hset +hdel +hincrby)",
)

_ROOM = (
    "+info",  # maxmemory
    "(~epd:v1:embs:* +evalsha +zadd +zrem +zscore +zrange +zrangebyscore)",
    "(~epd:v1:embs:* +hget +hset +hdel +hincrby +pexpire)",
    "(~epd:v1:emb:* +unlink)",
)

_NIXL = "(~epd:v1:nixl:* +get +set +del)"

VALKEY_ROLES: dict[str, tuple[str, ...]] = {
    "gateway": (
        _SCRIPTS,
        _STATES,
        _WAITING,
        "(~epd:v1:media:* +get +set +expire +exists)",
        "(~epd:v1:file:* +get +set +expire +exists +del)",
        "(%W~epd:v1:body:* +set +del)",
        "(%R~epd:v1:body:* +exists)",
        "(%R~epd:v1:sizes:* +hmget)",
        _LEDGER,
        *_QUOTAS,
    ),
    "encoder": (
        _SCRIPTS,
        _STATES,
        "(%R~epd:v1:media:* +get)",
        "(~epd:v1:emb:* +get +set +expire)",
        *_ROOM,
        _NIXL,
        "(~epd:v1:begun:* +incrby +decrby +get +del +expire)",
    ),
    "pd": (
        _SCRIPTS,
        _STATES,
        _WAITING,
        "(~epd:v1:media:* +get +set +expire)",
        "(~epd:v1:file:* +get +expire)",
        "(%R~epd:v1:body:* +get)",
        "(~epd:v1:emb:* +get +getex +set +expire +del)",
        *_ROOM,
        _NIXL,
        "(~epd:v1:begun:* +incrby +decrby +get +del +expire)",
        "(~epd:v1:sizes:* +hmget +hlen +hset +expire)",
        "(~epd:v1:cancelled:* +set +exists)",
    ),
    "operator": ("~epd:v1:* +@all -@admin -@dangerous +info",),
}

FILE_HEAD = """\
# Users of Valkey and what each may do; in its configuration: include /etc/valkey/users.conf
# Made from libs/cli/epd_cli/valkey_users.py by scripts/write_docs.py.
#
# Put a password of its own behind each >, or its SHA-256 behind a # instead.
user default off
"""


def users(password: Callable[[str], str]) -> str:
    """A user for each role, one a line of the server's configuration.

    Args:
        password: Of a role: ``>PASSWORD`` or ``#SHA256``.
    """
    return "".join(
        f"user {role} on {password(role)} resetchannels {CONNECT} {' '.join(rights)}\n"
        for role, rights in VALKEY_ROLES.items()
    )


def users_file() -> str:
    """``deploy/valkey/users.conf``."""
    return FILE_HEAD + users(lambda role: f">change-me-{role}")
