"""The schedule file: its keys, their validation, and errors that name file, line, value and what is accepted."""

import difflib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, PrivateAttr, StrictStr, ValidationError
from pydantic_core import ErrorDetails

from lowbit_attn.recipes import canonical_text, recipe_names
from lowbit_attn.schedules.families import FAMILIES, KINDS, Kind
from lowbit_attn.schedules.grid import BoundSchedule, Layout, bind_rules
from lowbit_attn.schedules.selector import EVERYTHING, Selector
from lowbit_attn.schedules.source import Location, ScheduleError, Source, read

UNCHANGED = "unchanged"
"""The value of `cross` that leaves those modules alone."""

MODEL = f"auto, {', '.join(FAMILIES)}"
MODULES = "a module name or a list of them, with * and ?"
RECIPE = f"a recipe name, options allowed: {', '.join(recipe_names())}"


def _cross_recipe(text: str) -> str:
    return UNCHANGED if text.strip() == UNCHANGED else canonical_text(text)


def _model(name: str) -> str:
    if name not in ("auto", *FAMILIES):
        raise ValueError(f"got {name!r}; accepted: {MODEL}")
    return name


def _patterns(value: Any) -> tuple[str, ...]:
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple) or not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise ValueError(f"got {value!r}; accepted: {MODULES}")
    return tuple(patterns)


RecipeName = Annotated[StrictStr, AfterValidator(canonical_text)]
Positive = Annotated[int, Field(strict=True, gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Rule(_Section):
    """One recipe for the calls that every given key selects; keys left out select all."""

    recipe: RecipeName = Field(description=RECIPE)
    steps: Selector = Field(EVERYTHING, description="an index, a list, or first, last, from/to")
    blocks: Selector = Field(EVERYTHING, description="an index, a list, or first, last, from/to")
    expert: Literal["high_noise", "low_noise"] | None = Field(None, description="high_noise, low_noise")
    stream: Literal["main", "vace", "dual", "single"] | None = Field(None, description="main, vace, dual, single")
    kind: Kind | None = Field(None, description=f"{', '.join(KINDS)} (left out: self and joint)")
    modules: Annotated[tuple[str, ...], PlainValidator(_patterns)] = Field((), description=MODULES)


class AttentionSection(_Section):
    """Recipes of self-attention (joint attention included) by rule, and of cross-attention."""

    default: RecipeName = Field(description=RECIPE)
    cross: Annotated[StrictStr, AfterValidator(_cross_recipe)] = Field(UNCHANGED, description=f"{UNCHANGED}, or {RECIPE}")
    on_unsupported: Literal["error", "unchanged"] = Field("error", description="error, unchanged")
    rules: tuple[Rule, ...] = Field((), description="a list of rules")


class Sampling(_Section):
    """How the schedule's source samples. `lowbit-attn generate` sets it; patching a pipeline does not."""

    scheduler: StrictStr | None = Field(None, description="the name of a diffusers scheduler class")
    flow_shift: float | None = Field(None, gt=0, description="a positive number")
    steps: Positive | None = Field(None, description="a number of denoising steps")
    guidance_scale: float | None = Field(None, ge=0, description="a number, at least 0")
    guidance_scale_2: float | None = Field(None, ge=0, description="a number, at least 0, for the low-noise expert")
    frames: Positive | None = Field(None, description="a number of frames")
    width: Positive | None = Field(None, description="a number of pixels")
    height: Positive | None = Field(None, description="a number of pixels")
    fps: float | None = Field(None, gt=0, description="frames per second, a positive number")


class PrecisionSchedule(_Section):
    """Which recipe runs at which step and block, of which expert and stream."""

    version: Literal[1] = Field(description="1")
    name: StrictStr = Field(description="text")
    model: Annotated[StrictStr, AfterValidator(_model)] = Field("auto", description=MODEL)
    attention: AttentionSection = Field(description="a mapping with default, cross, rules, on_unsupported")
    sampling: Sampling = Field(Sampling.model_validate({}), description=f"a mapping with {', '.join(Sampling.model_fields)}")

    _source: Source = PrivateAttr(default_factory=lambda: Source("<schedule>", {}))

    def check(self, blocks: int | Mapping[str, int], experts: tuple[str, ...] | None = None,
              model: str | None = None) -> BoundSchedule:
        """Everything that can be checked before the number of steps is known; arguments and errors as in `bind`."""
        return self.bind(None, blocks, experts, model)

    def bind(self, steps: int | None, blocks: int | Mapping[str, int], experts: tuple[str, ...] | None = None,
             model: str | None = None) -> BoundSchedule:
        """Resolve for a concrete run; ScheduleError names the line of what does not fit.

        Args:
            steps: number of denoising steps; None checks blocks, experts and modules only and gives grids without steps.
            blocks: number of blocks, or of the blocks of each stream in order (`{"dual": 20, "single": 40}`). Indices run
                on through the streams: here dual blocks are 0 to 19 and single blocks 20 to 59.
            experts: names of the models that share the denoising. None means those that the rules speak of.
            model: family, for the names of the modules; None for the schedule's own.
        """
        layout = Layout.of(steps, blocks, experts or self._expert_names(), model or self.model)
        return bind_rules(self._source, self.attention, layout)

    def _expert_names(self) -> tuple[str, ...]:
        mentioned = any(rule.expert for rule in self.attention.rules)
        return ("high_noise", "low_noise") if mentioned else ("transformer",)


def load(source: str | Path | Mapping[str, Any] | PrecisionSchedule) -> PrecisionSchedule:
    """Read and validate a schedule; ScheduleError (a ValueError) lists every mistake with its line.

    Args:
        source: path of a YAML file, YAML text, a mapping of the same shape, or a plain recipe name that is to run everywhere.
    """
    if isinstance(source, PrecisionSchedule):
        return source
    origin = read(source, recipe_names())
    try:
        schedule = PrecisionSchedule.model_validate(origin.data)
    except ValidationError as error:
        problems = [_explain(origin, details) for details in error.errors()]
        raise ScheduleError("\n".join(problems)) from None
    schedule._source = origin
    return schedule


def _explain(source: Source, details: ErrorDetails) -> str:
    location: Location = tuple(details["loc"])
    if location and location[-1] == "at" and source.value(location) is None:
        location = location[:-1]  # a bare number or list, which the file holds without the key
    section, description = _section_at(location)
    accepted = ", ".join(field.alias or name for name, field in section.model_fields.items())
    got: Any = details["input"]
    match details["type"]:
        case "extra_forbidden":
            key = str(location[-1])
            near = difflib.get_close_matches(key, accepted.split(", "), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            return source.describe(location, f"got unknown key {key!r} with value {got!r}{hint}; accepted keys: {accepted}")
        case "missing":
            return source.describe(location, f"missing; accepted: {description}")
        case "value_error":
            problem = str(details["ctx"]["error"])
            return source.describe(location, problem if "got " in problem else f"got {got!r}: {problem}")
        case _:
            return source.describe(location, f"got {got!r}; accepted: {description or f'a mapping with {accepted}'}")


def _section_at(location: Location) -> tuple[type[BaseModel], str]:
    """The model that holds the last key of `location`, and what that key accepts."""
    section: type[BaseModel] = PrecisionSchedule
    inner: type[BaseModel] | None = PrecisionSchedule
    description = ""
    for part in location:
        if isinstance(part, int):
            description = ""
            continue
        if inner is None:
            break
        section = inner
        field = next((f for name, f in section.model_fields.items() if part == (f.alias or name)), None)
        description = (field.description or "") if field else ""
        inner = _model_in(field.annotation) if field else None
    if location and isinstance(location[-1], int) and inner is not None:
        section = inner
    return section, description


def _model_in(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
