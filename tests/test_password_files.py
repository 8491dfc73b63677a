"""Passwords of brokers that lie in files, as secrets of containers do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from epd_cli.brokers import Brokers
from epd_common.bus import Bus
from epd_common.errors import LoginRefusedError
from epd_common.login import NatsLogin
from epd_common.settings import CommonSettings, SettingsError, load_settings
from epd_common.store import open_redis


def split(url: str, folder: Path, name: str) -> tuple[str, Path]:
    """The URL without its password, and a file that has it."""
    found = re.search(r"://([^:]*):([^@]*)@", url)
    assert found is not None
    file = folder / name
    file.write_text(found[2] + "\n")
    return url.replace(f":{found[2]}@", "@"), file


async def test_nats_takes_the_password_of_a_file(brokers: Brokers, tmp_path: Path) -> None:
    url, file = split(brokers.nats.url_for("encoder"), tmp_path, "nats")
    settings = CommonSettings(nats_url=url, nats_password_file=file)
    async with Bus(url, name="test", login=settings.nats_login(), inbox="_INBOX_encoder") as bus:
        assert bus.connected
    file.write_text("another")
    with pytest.raises(LoginRefusedError, match="are the user, the password"):
        async with Bus(url, name="test", login=settings.nats_login()):
            pass


async def test_valkey_takes_the_password_of_a_file(brokers: Brokers, tmp_path: Path) -> None:
    for user in ("encoder", ""):
        url = brokers.redis.url_for("encoder") if user else brokers.redis_url
        bare, file = split(url, tmp_path, "redis")
        async with open_redis(bare, password_file=file) as redis:
            assert await redis.ping()
        file.write_text("an other: %40/x")
        with pytest.raises(LoginRefusedError, match="refuses the login") as caught:
            async with open_redis(bare, password_file=file):
                pass
        assert "an other" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"nats_url": "nats://a:secret@h:4222", "nats_password_file": "good"},
            "must name one user and no password",
        ),
        (
            {"nats_url": "nats://h:4222", "nats_password_file": "good"},
            "must name one user and no password",
        ),
        (
            {"nats_url": "nats://a@h1:4222,nats://b@h2:4222", "nats_password_file": "good"},
            "must name one user and no password",
        ),
        ({"nats_url": "nats://a@h:4222", "nats_password_file": "empty"}, "empty is empty"),
        (
            {
                "nats_url": "nats://a@h:4222",
                "nats_password_file": "good",
                "nats_creds": "good",
            },
            "not beside EPD_NATS_CREDS",
        ),
        (
            {"redis_url": "redis://a:secret@h:6379/0", "redis_password_file": "good"},
            "must hold no password",
        ),
        ({"redis_url": "redis://a@h:6379/0", "redis_password_file": "empty"}, "empty is empty"),
        ({"redis_password_file": "missing"}, "EPD_REDIS_PASSWORD_FILE"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, given: dict[str, str], said: str) -> None:
    (tmp_path / "good").write_text("secret")
    (tmp_path / "empty").write_text("\n")
    paths = {
        name: str(tmp_path / value) if not name.endswith("_url") else value
        for name, value in given.items()
    }
    with pytest.raises(SettingsError, match=said) as caught:
        load_settings(CommonSettings, **paths)
    assert "secret" not in str(caught.value)


def test_several_servers_have_one_user() -> None:
    file = Path(__file__)
    url = "nats://a@h1:4222, nats://a@h2:4222"
    login = CommonSettings(nats_url=url, nats_password_file=file).nats_login()
    assert login == NatsLogin(password_file=file)


@pytest.mark.parametrize("url", ["redis://h", "rediss://u:p@h:1/0", "unix:///s", "unix://:p@/s"])
def test_urls_of_valkey(url: str) -> None:
    assert CommonSettings(redis_url=url).redis_url == url


@pytest.mark.parametrize("url", ["h:6379", "http://h", "redis://", "unix://", "redis://h:secret"])
def test_what_is_no_url_of_valkey_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(SettingsError, match=r"EPD_REDIS_URL: .*redis://HOST:PORT/0") as caught:
        load_settings(CommonSettings, redis_url=url)
    assert "secret" not in str(caught.value)
