"""Which steps or blocks a rule is for."""

from fractions import Fraction
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

INDICES = "0-based indices: a number or a list without repeats"
AMOUNT = "a count of at least 1, or a percentage such as '15%' (rounded outward)"
INDEX = "a 0-based index"


class SelectionError(ValueError):
    """A selector that does not fit the number of steps or blocks: the key at fault, and the problem."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(problem)
        self.key = key


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _amount(value: Any) -> int | Fraction:
    if _is_index(value) and value > 0:
        return int(value)
    if isinstance(value, str) and value.endswith("%"):
        try:
            share = Fraction(value[:-1].strip()) / 100
        except (ValueError, ZeroDivisionError):
            share = Fraction(0)
        if 0 < share <= 1:
            return share
    raise ValueError(f"got {value!r}; accepted: {AMOUNT}")


def _indices(value: Any) -> tuple[int, ...]:
    indices = value if isinstance(value, list | tuple) else [value]
    if not indices or not all(map(_is_index, indices)) or len(set(indices)) < len(indices):
        raise ValueError(f"got {value!r}; accepted: {INDICES}")
    return tuple(indices)


def _index(value: Any) -> int:
    if not _is_index(value):
        raise ValueError(f"got {value!r}; accepted: {INDEX}")
    return int(value)


class Selector(BaseModel):
    """Indices, the first or last so many, or an inclusive range. A bare number or list means `at`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    first: Annotated[int | Fraction | None, PlainValidator(_amount)] = Field(None, description=AMOUNT)
    last: Annotated[int | Fraction | None, PlainValidator(_amount)] = Field(None, description=AMOUNT)
    from_: Annotated[int | None, PlainValidator(_index)] = Field(None, alias="from", description=INDEX)
    to: Annotated[int | None, PlainValidator(_index)] = Field(None, description=INDEX)
    at: Annotated[tuple[int, ...] | None, PlainValidator(_indices)] = Field(None, description=INDICES)

    @model_validator(mode="before")
    @classmethod
    def _bare_indices(cls, data: Any) -> Any:
        return data if isinstance(data, dict) else {"at": data}

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        given = [(self.__pydantic_fields__[name].alias or name) for name in self.model_fields_set]
        is_range = set(given) == {"from", "to"}
        if len(given) != 1 and not is_range:
            got = " and ".join(sorted(given)) or "nothing"
            raise ValueError(f"got {got}; accepted: one of first, last, at, or from with to")
        if self.from_ is not None and self.to is not None and self.from_ > self.to:
            raise ValueError(f"got from {self.from_} to {self.to}; accepted: from <= to (ranges are inclusive)")
        return self

    def resolve(self, count: int, unit: str) -> frozenset[int]:
        """The indices out of `count` steps or blocks (`unit`, for messages); SelectionError for one that does not exist."""
        for key in ("first", "last"):
            if (amount := getattr(self, key)) is not None:
                size = _size(amount, count)
                if size > count:
                    raise SelectionError(key, f"got {amount}; accepted: 1 to {count}, there are {count} {unit}")
                return frozenset(range(size) if key == "first" else range(count - size, count))
        wanted = {"at": self.at or (), "from": _some(self.from_), "to": _some(self.to)}
        for key, indices in wanted.items():
            for index in indices:
                if index >= count:
                    raise SelectionError(key, f"got {index}; accepted: 0 to {count - 1}, there are {count} {unit}")
        if self.at is not None:
            return frozenset(self.at)
        return frozenset(range(self.from_ or 0, (count - 1 if self.to is None else self.to) + 1))


EVERYTHING = Selector.model_validate({"first": "100%"})
"""Selects all there is."""


def _size(amount: int | Fraction, count: int) -> int:
    return amount if isinstance(amount, int) else -(-amount.numerator * count // amount.denominator)


def _some(index: int | None) -> tuple[int, ...]:
    return () if index is None else (index,)
