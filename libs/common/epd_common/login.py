"""What a connection to NATS shows of itself, and whom it trusts, beside what its URL says."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

_NATS_SCHEMES = ("nats", "tls", "ws", "wss")
_CREDS_MARKS = (b"BEGIN NATS USER JWT", b"BEGIN USER NKEY SEED")


def nats_servers(urls: str) -> list[str]:
    """The URLs of a cluster's servers, which stand with commas between them; ``nats://`` may be left out.

    Raises:
        ValueError: one of them is no URL; the text shows none, for passwords may be inside.
    """
    found = [url.strip() for url in re.split(r",(?=\s*[a-z]+://)", urls)]
    found = [url if "://" in url else f"nats://{url}" for url in found]
    for number, url in enumerate(found, 1):
        try:
            parts = urlsplit(url)
            whole = parts.scheme in _NATS_SCHEMES and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            whole = False
        if not whole:
            raise ValueError(
                f"URL {number} of {len(found)} is not nats://HOST:PORT or tls://HOST:PORT; between several "
                "stand commas"
            )
    return found


def check_users_alone(urls: str) -> None:
    """See that NATS URLs name one user and no password, which comes from a file.

    Raises:
        ValueError: they do not.
    """
    logins = {
        (parts.username, parts.password) for url in nats_servers(urls) for parts in [urlsplit(url)]
    }
    user, password = next(iter(logins))
    if len(logins) > 1 or not user or password is not None:
        raise ValueError(
            "EPD_NATS_PASSWORD_FILE is set, so EPD_NATS_URL must name one user and no password: "
            "nats://USER@HOST:PORT"
        )


def check_redis_url(url: str) -> None:
    """See that this is a URL of Valkey or Redis.

    Raises:
        ValueError: it is none; the text does not show it, for a password may be inside.
    """
    try:
        parts = urlsplit(url)
        whole = parts.path not in ("", "/") if parts.scheme == "unix" else bool(parts.hostname)
        whole = whole and parts.scheme in ("redis", "rediss", "unix") and (parts.port or 1) > 0
    except ValueError:
        whole = False
    if not whole:
        raise ValueError("it is not redis://HOST:PORT/0, rediss://HOST:PORT/0 or unix:///PATH")


def read_password(path: Path, variable: str) -> str:
    """The password in a file, without the line end that editors put behind it.

    Raises:
        ValueError: naming the variable: it cannot be read, or is empty.
    """
    try:
        password = path.read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{variable}: {path} cannot be read ({error})") from None
    if not password:
        raise ValueError(f"{variable}: {path} is empty")
    return password


@dataclass(frozen=True, slots=True)
class NatsLogin:
    """Files that are read at every connect, so that a replaced one counts from the next on.

    Attributes:
        creds: A ``.creds`` file: a user's JWT and NKey seed.
        nkey_seed_file: A file with an NKey seed and nothing else.
        password_file: A file with the password of the user that the URL names.
        ca: Certificates (PEM) that may have signed the server's; without it those of the system. With it
            a server that does not speak TLS is refused.
    """

    creds: Path | None = None
    nkey_seed_file: Path | None = None
    password_file: Path | None = None
    ca: Path | None = None

    def check(self) -> None:
        """Look into the files, before anything is connected.

        Raises:
            ValueError: naming the variable and what is wrong; nothing of a file's content.
        """
        if self.creds and self.nkey_seed_file:
            raise ValueError("set one of EPD_NATS_CREDS and EPD_NATS_NKEY_SEED_FILE, not both")
        if self.password_file:
            if self.creds or self.nkey_seed_file:
                raise ValueError(
                    "EPD_NATS_PASSWORD_FILE is for users with a password: not beside EPD_NATS_CREDS or "
                    "EPD_NATS_NKEY_SEED_FILE"
                )
            self.password()
        if self.creds or self.nkey_seed_file:
            if find_spec("nkeys") is None:
                raise ValueError(
                    "EPD_NATS_CREDS and EPD_NATS_NKEY_SEED_FILE need the extra `nkeys` "
                    "(pip install 'epdflow[nkeys]')"
                )
            if self.creds and not all(mark in _read(self.creds) for mark in _CREDS_MARKS):
                raise ValueError("EPD_NATS_CREDS: the file holds no user JWT with its NKey seed")
            if self.nkey_seed_file and not _is_seed(_read(self.nkey_seed_file)):
                raise ValueError("EPD_NATS_NKEY_SEED_FILE: the file holds no NKey seed of a user")
        if self.ca:
            check_ca(self.ca, "EPD_NATS_CA")

    def password(self) -> str | None:
        """The password in the file; None where there is no file.

        Raises:
            ValueError: it cannot be read, or is empty.
        """
        if self.password_file is None:
            return None
        return read_password(self.password_file, "EPD_NATS_PASSWORD_FILE")

    def tls(self) -> ssl.SSLContext | None:
        """How the server's certificate is checked; None for the usual way."""
        return ssl.create_default_context(cafile=self.ca) if self.ca else None


def check_ca(path: Path, variable: str) -> None:
    """See that a file holds certificates.

    Raises:
        ValueError: it does not, or cannot be read.
    """
    try:
        ssl.create_default_context(cafile=path)
    except OSError as error:  # ssl.SSLError is one
        raise ValueError(f"{variable}: no certificates in {path} ({error.strerror})") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


def _is_seed(content: bytes) -> bool:
    import nkeys

    try:
        pair = nkeys.from_seed(bytearray(content.strip()))
        return bool(pair.public_key.startswith(b"U"))
    except Exception:  # the package has a dozen, without a common root
        return False
