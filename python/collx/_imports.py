"""Runs actions when a module is imported, so that `import collx` does not import slow modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["after_import"]


def after_import(name: str, action: Callable[[], None]) -> None:
    """Calls `action` once, after the module is imported; immediately if it already is."""
    if name in sys.modules:
        action()
    elif name in _watches:
        _watches[name].actions.append(action)
    else:
        _watches[name] = _Watch(name, action)
        sys.meta_path.insert(0, _watches[name])


class _Watch(MetaPathFinder):
    """Finds one module with the other finders, and runs the actions after the module's code."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self.actions = [action]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            # If the module's code raises, the watch remains for the next import.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                del _watches[self._name]
                for action in self.actions:
                    action()

        # Set on the loader itself, so that the module keeps its usual loader.
        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


# Watches of modules that have not been imported, by module name. There is one for each module,
# because a watch calls all other finders.
_watches: dict[str, _Watch] = {}
