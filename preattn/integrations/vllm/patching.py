"""Replacing names of an engine's modules: as each is imported, in order, and back again.

Nothing here imports the engine. A module that is loaded already is patched at once, any other right after its own
import, so that a process that never runs a model never loads one.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any, NamedTuple

Action = Callable[[ModuleType], None]


class Occupied(RuntimeError):
    """A name that is to be replaced holds somebody else's object already."""


class _Patch(NamedTuple):
    owner: Any
    name: str
    original: Any
    replacement: Any
    inherited: bool


class Patches:
    """The names that are replaced in this process."""

    def __init__(self) -> None:
        self._patches: list[_Patch] = []

    def __len__(self) -> int:
        return len(self._patches)

    def replace(
        self, owner: Any, name: str, replacement: Any, *, defined_in: str | None = None, instead_of: Any = None
    ) -> Any:
        """Set ``owner.name`` to ``replacement`` and return what it held.

        Args:
            owner: a module or a class.
            name: an attribute of it, its own or inherited.
            replacement: what it becomes.
            defined_in: the module that the object there has to come from.
            instead_of: what goes back there, where the name holds ``replacement`` already: an import has copied it.

        Raises:
            AttributeError: there is no such name.
            Occupied: the object comes from elsewhere; the message names from where.
        """
        original = getattr(owner, name)
        if original is replacement:
            original = instead_of
        if defined_in is not None and getattr(original, "__module__", None) != defined_in:
            raise Occupied(f"{_name(owner)}.{name} is not {defined_in}'s own: {whence(original)} replaced it")
        inherited = isinstance(owner, type) and name not in vars(owner)
        self._patches.append(_Patch(owner, name, original, replacement, inherited))
        setattr(owner, name, replacement)
        return original

    def taken(self) -> list[str]:
        """Names that somebody else has replaced since, each with who did."""
        return [
            f"{_name(patch.owner)}.{patch.name}, replaced by {whence(now)}"
            for patch in self._patches
            if (now := getattr(patch.owner, patch.name, None)) is not patch.replacement
        ]

    def restore(self) -> None:
        """Put every original back, the last replaced first; a name that somebody else has replaced is left to them."""
        while self._patches:
            patch = self._patches.pop()
            if getattr(patch.owner, patch.name, None) is not patch.replacement:
                continue
            if patch.inherited:
                delattr(patch.owner, patch.name)
            else:
                setattr(patch.owner, patch.name, patch.original)


def _name(owner: Any) -> str:
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else str(owner.__name__)


def whence(thing: object) -> str:
    """Where an object comes from: module and name, and the file where there is one."""
    module = getattr(thing, "__module__", None) or type(thing).__module__
    name = getattr(thing, "__qualname__", None) or type(thing).__qualname__
    try:
        file = inspect.getfile(inspect.unwrap(thing) if callable(thing) else type(thing))
    except (TypeError, OSError):
        return f"{module}.{name}"
    return f"{module}.{name} ({file})"


class AfterImport(MetaPathFinder):
    """Runs an action on each of some modules, right after its import, or at once where it is loaded."""

    def __init__(self, actions: dict[str, Action]) -> None:
        self._actions = actions

    def install(self) -> None:
        """Start watching imports, and act on what is loaded already, in the order of the actions."""
        sys.meta_path.insert(0, self)
        for name, action in self._actions.items():
            module = sys.modules.get(name)
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                action(module)

    def remove(self) -> None:
        """Stop watching imports."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the next finder gives, its loader followed by the action."""
        action = self._actions.get(fullname)
        if action is None:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                _follow(spec.loader, action)
                return spec
        return None


def _follow(loader: Loader, action: Action) -> None:
    """Have a loader run the action after it has run a module."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        action(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]
