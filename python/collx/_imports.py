"""Actions that run when a module is imported: `import collx` does not import slow ones itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["after_import"]


def after_import(name: str, action: Callable[[], None]) -> None:
    """Calls `action` once, as soon as the module has been imported; at once if it has been."""
    if name in sys.modules:
        action()
    elif name in _watches:
        _watches[name].actions.append(action)
    else:
        _watches[name] = _Watch(name, action)
        sys.meta_path.insert(0, _watches[name])


class _Watch(MetaPathFinder):
    """Finds one module as the other finders do, and runs the actions after the module's code."""

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
            # Stays for another attempt if the module's code raises.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                del _watches[self._name]
                for action in self.actions:
                    action()

        # On the loader itself, so that the module still has its usual loader.
        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


# Of the modules that have not been imported. One for each, since a watch asks all other finders.
_watches: dict[str, _Watch] = {}
