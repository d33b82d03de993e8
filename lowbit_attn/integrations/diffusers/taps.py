"""Observers around one method of one object."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, Self

Observer = tuple[Callable[[], None] | None, Callable[[Any], None] | None]
"""What runs before the method, and what gets its result."""


class Tap:
    """A wrapper around one method of one object, shared by all who observe it; the object has its own method again afterwards."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self._observers: dict[object, Observer] = {}
        self._replaced = vars(owner).get(name)
        original = getattr(owner, name)
        bound = isinstance(original, MethodType)
        function = original.__func__ if bound else original

        @functools.wraps(function)  # pipelines inspect the signature
        def tapped(*args: Any, **kwargs: Any) -> Any:
            # A deep copy of the owner carries this method, bound to the copy: nobody observes that one.
            observers = [] if bound and args[0] is not owner else list(self._observers.values())
            for before, _ in observers:
                if before is not None:
                    before()
            result = function(*args, **kwargs)
            for _, after in observers:
                if after is not None:
                    after(result)
            return result

        tapped.lowbit_attn_tap = self  # type: ignore[attr-defined]
        self._installed = MethodType(tapped, owner) if bound else tapped
        setattr(owner, name, self._installed)

    @classmethod
    def on(cls, owner: Any, name: str) -> Self:
        """The tap that is already there, or a new one."""
        present = getattr(vars(owner).get(name), "lowbit_attn_tap", None)
        return present if isinstance(present, cls) and present.owner is owner else cls(owner, name)

    def observe(self, observer: object, before: Callable[[], None] | None, after: Callable[[Any], None] | None) -> None:
        """Let `observer` know of each call, until it is released."""
        self._observers[observer] = (before, after)

    def release(self, observer: object) -> None:
        """Forget `observer`. After the last one the original is back; a tap that others have wrapped since stays, inert."""
        self._observers.pop(observer, None)
        if not self._observers and vars(self.owner).get(self.name) is self._installed:
            if self._replaced is None:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self._replaced)
