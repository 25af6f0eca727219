"""What a plan assumes about a call besides its run-time sizes: tensors' types, plain values, state.

State is what a trace reads from modules besides their tensors: modes, and plain Python attributes
such as an epsilon.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megafuse.errors import UnsupportedError

PLAIN = (bool, int, float, str)
MOST_FROZEN = 64
"""Longer lists and dicts count as one object: what they hold is not looked at."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_INTERNAL = frozenset(nn.Module().__dict__) - {"training"}

State = tuple[tuple[str, str, Any], ...]


@dataclass(frozen=True)
class Signature:
    """spec: structure of the arguments. constants: the arguments that are no tensors, frozen.
    state: (module path, attribute, frozen value). names: of parameters and buffers. tensors: what
    is fixed of each flat tensor."""

    spec: str
    constants: tuple[Any, ...]
    state: State
    names: tuple[tuple[int, str], ...]
    tensors: tuple[Any, ...]

    def without_numbers(self) -> Any:
        """What is left when the plain numbers may be any."""
        state = tuple((path, name, _kind(v)) for path, name, v in self.state)
        return self.spec, _kind(self.constants), state, self.names, self.tensors

    def differences(self, other: Signature) -> list[str]:
        """Which plain values are not those of `other`, by name."""
        named = [f"{path}.{name}".lstrip(".") for (path, name, v), (_, _, w)
                 in zip(self.state, other.state, strict=True) if v != w]  # fmt: skip
        return named + [f"an argument ({_show(w)}, now {_show(v)})" for v, w
                        in zip(self.constants, other.constants, strict=True) if v != w]  # fmt: skip


def _show(frozen: Any) -> str:
    return str(frozen[1]) if isinstance(frozen, tuple) and len(frozen) == 2 else str(frozen)


class _Same:
    """Equal to itself only; keeps its object alive, so that no other takes its identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def freeze(value: Any) -> Any:
    """A hashable stand-in for `value`, equal only where a trace would read the same: numbers of
    other types, and the zeros of both signs, differ."""
    kind = type(value)
    if kind in PLAIN:
        return kind, (value if value and value == value else repr(value))
    if isinstance(value, (list, tuple)) and len(value) <= MOST_FROZEN:
        return kind, tuple(map(freeze, value))
    if isinstance(value, dict) and len(value) <= MOST_FROZEN:
        return kind, tuple((freeze(k), freeze(v)) for k, v in value.items())
    if isinstance(value, (nn.Module, torch.Tensor)):
        return _Same(value)
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return kind, value


def _kind(frozen: Any) -> Any:
    if not isinstance(frozen, tuple):
        return frozen
    if len(frozen) == 2 and frozen[0] in (int, float):
        return frozen[0]
    return tuple(map(_kind, frozen))


# -- modules


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Where the module's own attributes are; a fused module's are those of its original."""
    target = module.__dict__["original"] if getattr(type(module), "_is_fused", False) else module
    return target.__dict__


def state_of(roots: Iterable[nn.Module]) -> State:
    return tuple(
        (path, name, freeze(value))
        for root in roots
        for path, module in root.named_modules()
        for name, value in _attributes(module).items() if name not in _INTERNAL
    )  # fmt: skip


def hooked(roots: Iterable[nn.Module]) -> list[str]:
    """Paths of the modules that have hooks. A `torch.export` program's own, which check the shapes
    of its inputs, are traced with it instead."""
    return [
        path or "the module itself"
        for root in roots
        for path, module in root.named_modules()
        for h in _HOOKS
        if any(
            not getattr(hook, "__module__", "").startswith("torch.export.")
            for hook in (_attributes(module).get(h) or module.__dict__.get(h) or {}).values()
        )
    ]


@contextmanager
def unchanged(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Code that is traced in this context must leave the modules' state as it found it.

    Puts the state back. Raises UnsupportedError naming what was changed.
    """
    before = state_of(roots)
    stores = [_attributes(m) for root in roots for m in root.modules()]
    copies = [{k: v for k, v in store.items() if k not in _INTERNAL} for store in stores]
    contents = [(v, v.copy()) for c in copies for v in c.values() if type(v) in (list, dict)]
    try:
        yield
    finally:
        after = state_of(roots)
        if after != before:
            for value, content in contents:
                value.clear()
                value.extend(content) if isinstance(value, list) else value.update(content)
            for store, copy in zip(stores, copies, strict=True):
                for name in [n for n in store if n not in _INTERNAL and n not in copy]:
                    del store[name]
                store.update(copy)
    if after != before:
        was = set(before)
        names = sorted({f"{path}.{name}".lstrip(".") for path, name, v in after
                        if (path, name, v) not in was})  # fmt: skip
        raise UnsupportedError(
            f"the code sets {', '.join(names) or 'attributes'} when it runs; a fused module runs "
            "it once, to trace it. Keep such state in a buffer that is written in place "
            "(self.count.add_(1)), or outside the fused module."
        )


class Slots:
    """Where a module's tensors, hooks and attributes are kept, so that they can be read without a
    walk."""

    def __init__(self, module: nn.Module) -> None:
        self._children = [
            (parent._modules, name, child)
            for parent in module.modules() for name, child in parent._modules.items()
        ]  # fmt: skip
        self._places: list[tuple[dict[str, Any], str]] = []
        modules = dict(module.named_modules(remove_duplicate=False))
        for store, named in (("_parameters", module.named_parameters()),
                             ("_buffers", module.named_buffers())):  # fmt: skip
            for path, _ in named:
                owner, _, name = path.rpartition(".")
                self._places.append((getattr(modules[owner], store), name))
        stores = [_attributes(m) for m in module.modules()]
        self._attributes = [(s, n) for s in stores for n in s if n not in _INTERNAL]
        owners = [*stores, *(m.__dict__ for m in list(module.modules())[1:])]
        self._hooks = [s[h] for s in owners for h in _HOOKS if h in s]
        counted = [s for m in module.modules() for s in (m._parameters, m._buffers, m._modules)]
        self._stores = [*counted, *stores]
        self._counts = list(map(len, self._stores))
        self._values: list[Any] = []
        self._settled, self._state = False, 0
        self._states: dict[Any, int] = {}

    def current(self) -> bool:
        return (
            list(map(len, self._stores)) == self._counts
            and all(store.get(name) is child for store, name, child in self._children)
            and all(store.get(name) is not None for store, name in self._places)
        )

    def tensors(self) -> list[torch.Tensor]:
        return [store[name] for store, name in self._places]

    def hooked(self) -> bool:
        return any(self._hooks)

    def state(self) -> int:
        """Stands for what `state_of` tells: equal numbers mean equal states."""
        values = [store.get(name) for store, name in self._attributes]
        if self._settled and all(map(operator.is_, values, self._values)):
            return self._state
        self._values = values
        self._settled = all(map(_is_settled, values))
        self._state = self._states.setdefault(tuple(map(freeze, values)), len(self._states))
        return self._state


def _is_settled(value: Any) -> bool:
    """Whether freezing the same object again gives the same."""
    if isinstance(value, tuple):
        return all(map(_is_settled, value))
    return not isinstance(value, (list, dict))


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def leading(tensors: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    """Which inputs share the first one's leading extent: what capture treats as a batch."""
    sizes = [t.shape[0] if t.dim() else None for t in tensors]
    first = next((s for s in sizes if s is not None), None)
    return tuple(s == first for s in sizes)
