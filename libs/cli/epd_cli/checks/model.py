"""The model: is its checkpoint here, and whole?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from epd_cli.checks.finding import Finding
from epd_common.checkpoint import faults

_SHOWN = 3


def model(name: str, folder: Path | None, found: list[str], *, offline: bool) -> Finding:
    """Whether an engine can load it.

    Args:
        name: As ``EPD_MODEL`` says.
        folder: Where it is; None if it is on no disk here.
        found: What is wrong with its files.
        offline: The hub is not asked for what is missing.
    """
    if folder is None:
        if Path(name).is_absolute() or offline:
            return Finding(
                "model",
                "wrong",
                f"{name} is not here",
                "set EPD_MODEL to a folder with a config.json, or download it first",
            )
        return Finding(
            "model",
            "note",
            f"{name} is not on this disk; the first start downloads it from the hub",
            "check the name if it should be here; a model with a licence needs HF_TOKEN",
        )
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return Finding(
            "model",
            "wrong",
            f"{folder} is not whole: {'; '.join(found[:_SHOWN])}{more}",
            "copy or download it again",
        )
    where = name if name == str(folder) else f"{name} in {folder}"
    return Finding("model", "ok", f"{where}, its files are whole")


def folder_of(name: str, environment: Mapping[str, str]) -> Path | None:
    """The folder of a model: a path, or the newest snapshot in the hub's cache."""
    if Path(name).is_dir():
        return Path(name)
    home = environment.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    cache = Path(environment.get("HF_HUB_CACHE") or Path(home) / "hub")
    snapshots = cache / f"models--{name.replace('/', '--')}" / "snapshots"
    try:
        found = [entry for entry in snapshots.iterdir() if entry.is_dir()]
    except OSError:
        return None
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def look_at_model(name: str, environment: Mapping[str, str] = os.environ) -> Finding:
    """Find the model's folder and look at its files."""
    folder = folder_of(name, environment)
    found = [] if folder is None else faults(folder, environment.get("EPD_ENGINE_ARGS", ""))
    offline = environment.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
    return model(name, folder, found, offline=offline)
