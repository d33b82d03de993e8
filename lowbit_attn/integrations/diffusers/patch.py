"""`patch` a diffusers pipeline with a precision schedule, `unpatch` it, and `report` what ran."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from lowbit_attn.integrations.diffusers.record import RunReport
from lowbit_attn.integrations.diffusers.session import Plan, Session
from lowbit_attn.schedules import FAMILIES, PrecisionSchedule, load

Pipeline = TypeVar("Pipeline")

_SESSION = "_lowbit_attn_session"


def patch(pipe: Pipeline, schedule: str | Path | Mapping[str, Any] | PrecisionSchedule, *, model: str | None = None,
          report: bool = False) -> Pipeline:
    """Run a pipeline's self-attention in the precisions of a schedule, from the next call on; returns the pipeline.

    The schedule is in force while the pipeline's scheduler runs, from `set_timesteps` to the last `step`; calls of the model
    outside a run are stock attention, as is whatever a schedule gives recipe `bf16`. Weights, state dicts and all else but the
    scheduled attention modules stay as they are. Patching again replaces the schedule. An error leaves everything as it was.

    Args:
        pipe: a diffusers pipeline of a supported family (docs/video.md lists them), modular pipelines included.
        schedule: path of a YAML file, YAML text, a mapping, a `PrecisionSchedule`, or a plain recipe name.
        model: family of the pipeline's model, in place of the schedule's `model` key; "auto" takes it from the pipeline's class,
            and of a pipeline that is not known lists the attention modules in the error.
        report: measure the time of the attention modules, and print what ran at the end of each run.

    Raises:
        TypeError: a pipeline of another class.
        ValueError: a schedule that is wrong or does not fit this pipeline, or modules whose processors are not stock.
    """
    if model is not None and model not in ("auto", *FAMILIES):
        raise ValueError(f"model: got {model!r}; accepted: None, 'auto', {', '.join(FAMILIES)}")
    loaded = load(schedule)
    plan = Plan.of(pipe, loaded, loaded.model if model is None else model, _session_of(pipe))
    _remove(pipe)
    setattr(pipe, _SESSION, Session(pipe, plan, measure=report))
    return pipe


def unpatch(pipe: Pipeline) -> Pipeline:
    """Undo `patch` completely: the same processor objects, scheduler and model methods as before; returns the pipeline."""
    if _session_of(pipe) is None:
        raise ValueError(f"pipe: this {type(pipe).__name__} is not patched")
    _remove(pipe)
    return pipe


def report(pipe: Any) -> RunReport:
    """What the attention of a patched pipeline really ran in its last run (so far, if it is still running).

    Processors say so themselves each time they run, compiled or not, so a block that a cache skipped or a call that fell back
    is reported as such.
    """
    session = _session_of(pipe)
    if session is None:
        raise ValueError(f"pipe: this {type(pipe).__name__} is not patched")
    return session.snapshot()


def _session_of(pipe: Any) -> Session | None:
    return vars(pipe).get(_SESSION) if hasattr(pipe, "__dict__") else None


def _remove(pipe: Any) -> None:
    if (session := _session_of(pipe)) is not None:
        session.uninstall()
        delattr(pipe, _SESSION)
