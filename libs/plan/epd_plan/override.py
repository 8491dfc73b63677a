"""A plan as a file that deployments take: an override for Docker Compose, or values for Helm."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from epd_plan.planning import Choice, Plan, PlanError
from epd_plan.shape import Shape

Form = Literal["compose", "helm"]
NAMES: dict[Form, str] = {"compose": "compose.plan.yml", "helm": "values.plan.yaml"}

_MARK = "# Written by `epd plan`"


def override(plan: Plan, shape: Shape, form: Form) -> str:
    """The file's text.

    Raises:
        PlanError: servers of others are not this project's to deploy.
    """
    chosen = plan.chosen
    if chosen.system == "colocated":
        # The nearest that there is to it here.
        nearest = [choice for choice in plan.choices if choice.system == "ec_both"]
        if not nearest:
            raise PlanError("the plan is to have colocated servers, which are not deployed by this")
        chosen = nearest[0]
    settings = {
        "EPD_MAX_NUM_SEQS": str(shape.max_num_seqs),
        "EPD_PD_SLOTS": str(shape.pd_slots),
        "EPD_EC_ROLE": "ec_consumer" if chosen.encoders else "ec_both",
    }
    return _compose(plan, chosen, settings) if form == "compose" else _helm(plan, chosen, settings)


def write_override(path: Path, text: str) -> None:
    """Write the file; one that is there is replaced if it is an older plan.

    Raises:
        PlanError: it is something else, or cannot be written.
    """
    try:
        if path.exists() and not path.read_text().startswith(_MARK):
            raise PlanError(f"{path} is there and is no plan of `epd plan`; give another --out")
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error.strerror}") from error
    except UnicodeDecodeError:
        raise PlanError(
            f"{path} is there and is no plan of `epd plan`; give another --out"
        ) from None


def _head(plan: Plan, chosen: Choice) -> str:
    return (
        f"{_MARK}: {plan.workload} on {plan.profile} at {chosen.rate:.3g} requests/s,\n"
        f"# SLO {plan.slo}: {plan.decision}, {plan.why}.\n"
    )


def _compose(plan: Plan, chosen: Choice, settings: dict[str, str]) -> str:
    lines = "".join(f'      {name}: "{value}"\n' for name, value in settings.items())
    return (
        f"{_head(plan, chosen)}"
        "#   docker compose -f deploy/docker-compose.yml build\n"
        "#   docker compose -f deploy/docker-compose.yml -f THIS_FILE up --wait\n"
        "services:\n"
        f"  encoder:\n    scale: {chosen.encoders}\n"
        f"  pd:\n    scale: {chosen.pds}\n    environment:\n{lines}"
    )


def _helm(plan: Plan, chosen: Choice, settings: dict[str, str]) -> str:
    lines = "".join(f'          {name}: "{value}"\n' for name, value in settings.items())
    return (
        f"{_head(plan, chosen)}"
        "#   helm upgrade --install epd deploy/k8s/epdflow -f YOUR_VALUES -f THIS_FILE\n"
        f"gateway:\n  replicas: {max(1, chosen.gateways)}\n"
        "pools:\n"
        f"  encoder:\n    replicas: {chosen.encoders}\n    containers: {{encoder: {{}}}}\n"
        f"  pd:\n    replicas: {chosen.pds}\n    containers:\n      pd:\n        env:\n{lines}"
    )
