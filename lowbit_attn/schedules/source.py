"""YAML text as plain data that still knows the line of every key, so that errors can name it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lowbit_attn.schedules import shipped

Location = tuple[str | int, ...]


class ScheduleError(ValueError):
    """A schedule that is wrong in itself or does not fit the pipeline; says where, what came and what is accepted."""


def format_location(location: Location) -> str:
    """`("attention", "rules", 0, "recipe")` as `attention.rules[0].recipe`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "schedule"


@dataclass(frozen=True)
class Source:
    """The data of one schedule, the name it came under, and the line of each of its nodes (none for Python data)."""

    name: str
    data: Any
    lines: Mapping[Location, int] = field(default_factory=dict)

    def line(self, location: Location) -> int | None:
        """Line of the innermost node on the way to `location` that the source holds."""
        for end in range(len(location), -1, -1):
            if (line := self.lines.get(location[:end])) is not None:
                return line
        return None

    def error(self, location: Location, problem: str) -> ScheduleError:
        """An error that starts with `file:line: key:`."""
        return ScheduleError(self.describe(location, problem))

    def describe(self, location: Location, problem: str) -> str:
        """The text of such an error."""
        line = self.line(location)
        place = self.name if line is None else f"{self.name}:{line}"
        return f"{place}: {format_location(location)}: {problem}"

    def value(self, location: Location) -> Any:
        """What the source holds at `location`, None if nothing."""
        node: Any = self.data
        for part in location:
            try:
                node = node[part]
            except (KeyError, IndexError, TypeError):
                return None
        return node


def parse_yaml(text: str, name: str) -> Source:
    """Read one YAML document; ScheduleError with the line for malformed text, repeated keys and keys that are not text."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise ScheduleError(f"{name}:1: schedule: got an empty document; accepted: a mapping with version, name, attention")
        lines: dict[Location, int] = {}
        data = _plain(node, (), lines, loader, name, open_nodes=())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ScheduleError(f"{name}:{line}: schedule: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ScheduleError(f"{name}:1: schedule: not valid YAML: {error}") from None
    finally:
        loader.dispose()
    return Source(name, data, lines)


def _plain(node: yaml.Node, location: Location, lines: dict[Location, int], loader: yaml.SafeLoader, name: str,
           open_nodes: tuple[yaml.Node, ...]) -> Any:
    lines.setdefault(location, node.start_mark.line + 1)
    if node in open_nodes:
        raise ScheduleError(f"{name}:{lines[location]}: {format_location(location)}: an alias refers to a node around it")
    inside = (*open_nodes, node)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(child, (*location, i), lines, loader, name, inside) for i, child in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node)
    data: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = loader.construct_object(key_node) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            raise ScheduleError(f"{name}:{line}: {format_location(location)}: got a key {key!r}; accepted: text")
        if key in data:
            raise ScheduleError(f"{name}:{line}: {format_location((*location, key))}: given twice; accepted: once")
        lines[(*location, key)] = line
        data[key] = _plain(value_node, (*location, key), lines, loader, name, inside)
    return data


def read(source: str | Path | Mapping[str, Any], recipe_names: Sequence[str]) -> Source:
    """The Source behind a path, YAML text, a mapping, the name of a shipped schedule, or a recipe (which becomes the default)."""
    if isinstance(source, Mapping):
        return Source("<mapping>", dict(source))
    if isinstance(source, str):
        if "\n" in source or source.lstrip().startswith("{"):
            return parse_yaml(source, "<string>")
        if source.partition(":")[0].strip() in recipe_names:
            return Source("<recipe>", {"version": 1, "name": source, "attention": {"default": source}})
    elif not isinstance(source, Path):
        raise TypeError(f"schedule: got {type(source).__name__}; accepted: a path, YAML text, a mapping, a recipe name "
                        "or a PrecisionSchedule")
    accepted = (f"a YAML file, YAML text, a shipped schedule ({', '.join(shipped.schedule_names())}), or a recipe: "
                f"{', '.join(recipe_names)}")
    return parse_yaml(_text_of(shipped.find_schedule(source), accepted), str(source))


def _text_of(path: Path, accepted: str) -> str:
    try:
        if not path.is_file():
            raise ScheduleError(f"schedule: got {str(path)!r}, which is no file; accepted: {accepted}")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object[:error.start].count(b"\n") + 1
        raise ScheduleError(f"{path}:{line}: schedule: got byte 0x{error.object[error.start]:02X}, which is not UTF-8; accepted: "
                            "YAML text in UTF-8") from None
    except OSError as error:
        raise ScheduleError(f"schedule: got {str(path)!r}, which cannot be read ({error.strerror}); accepted: {accepted}") from None
