"""Imports on first use: the names that a package exports, and the built-in classes of a registry."""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mmattn.errors import ConfigError


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package: the imports of its `if TYPE_CHECKING:` block, on first use."""

    @functools.cache
    def homes() -> dict[str, str]:
        loader: Any = sys.modules[package].__spec__.loader  # type: ignore[union-attr]
        blocks = [node for node in ast.parse(loader.get_source(package)).body if isinstance(node, ast.If)]
        imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
        return {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        module = importlib.import_module(homes()[name])
        value = getattr(module, name, None)
        if value is None:  # a module of that package
            value = importlib.import_module(f"{homes()[name]}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes()})

    return get, names


class Registry(Mapping[str, Any]):
    """Registered classes by name; the module of a built-in class is imported when its name is first looked up."""

    def __init__(self, what: str, modules: Mapping[str, str]) -> None:
        self.what, self.modules = what, modules
        self.loaded: dict[str, Any] = {}

    def add(self, name: str, cls: Any) -> None:
        """Register a class; raise ConfigError if another class has this name."""
        registered = self.loaded.get(name)
        if registered is None and name in self.modules and not cls.__module__.startswith(self.modules[name]):
            registered = self[name]
        # A notebook cell that runs again defines the same class once more.
        if registered is not None and (registered.__module__, registered.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise ConfigError(
                f"{self.what} {name!r} is {registered.__module__}.{registered.__qualname__} already: give "
                f"{cls.__module__}.{cls.__qualname__} another name"
            )
        self.loaded[name] = cls

    def __getitem__(self, name: str) -> Any:
        if name not in self.loaded and name in self.modules:
            importlib.import_module(self.modules[name])
        return self.loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self.modules or name in self.loaded

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys([*self.modules, *self.loaded])

    def __len__(self) -> int:
        return len({*self.modules, *self.loaded})
