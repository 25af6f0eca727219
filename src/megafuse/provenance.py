"""Where traced nodes come from: the user's file and line, and the path of the module.

A `TorchFunctionMode` tags forward nodes; backward nodes inherit the tag of their forward operator
through autograd's sequence numbers. `importer.Importer.origin` reads the tags.
"""

from __future__ import annotations

import bisect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from megafuse.attention import is_attention, whole_attention
from megafuse.errors import UnsupportedError
from megafuse.exported import recorded_place
from megafuse.importer import BACKWARD, CAST

_HIDDEN = (str(Path(__file__).parent), str(Path(torch.__file__).parent), "<")
_EXAMPLES = str(Path(__file__).parent / "zoo")


def inner(filename: str) -> bool:
    """Whether a frame belongs to megafuse or PyTorch rather than to the code that is fused."""
    return filename.startswith(_HIDDEN) and not filename.startswith(_EXAMPLES)


_CASTS = {"to", "_to_copy", "bfloat16", "half", "float", "type", "type_as"}


class DataDependentError(RuntimeError):
    """Traced code asked for a tensor's values."""


class Provenance(TorchFunctionMode):
    """Tags every traced node with the user's line and module path.

    device: where the call's tensors live. Autocast for it is refused: on the tensors without data
    that are traced it would have no effect.
    """

    def __init__(self, module: nn.Module | None, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.unbound: list[Any] = []  # sizes that only tensor values tell, as ShapeEnv meets them
        self.paths: list[str] = [""]
        self.places: dict[int, str] = {}
        self.handles: list[Any] = []
        if module is not None:
            for path, child in module.named_modules():
                self.handles.append(child.register_forward_pre_hook(self._enter(path)))
                self.handles.append(child.register_forward_hook(self._leave, always_call=True))

    def _enter(self, path: str) -> Callable[..., None]:
        return lambda *_: self.paths.append(path)

    def _leave(self, *_: Any) -> None:
        self.paths.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._assert_tensor_metadata.default:
            return None  # exported programs assert a device, and meta is none of the user's
        kind = self.device.type
        if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
            raise UnsupportedError(
                f"{_place()}: the code opens torch.autocast({kind!r}) itself, which a trace "
                "does not see. Enter autocast around the call, or cast where it is needed."
            )
        frame, place = sys._getframe(1), None
        while frame is not None and inner(frame.f_code.co_filename):
            place = recorded_place(frame) if place is None else place
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            cast = f"|{CAST}" if getattr(func, "__name__", "").split(".")[0] in _CASTS else ""
            if place is None:
                place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            tag = f"{place}|{self.paths[-1]}{cast}"
            _set_tag(tag)
        result = None
        if is_attention(func):
            result = whole_attention(self.device, *args, **(kwargs or {}))
        if result is None:
            result = func(*args, **(kwargs or {}))
        if self.unbound:
            name = getattr(func, "__name__", str(func))
            raise DataDependentError(f"{name} makes a number or a size out of tensor values")
        if frame is not None:
            for value in tree_flatten(result)[0]:
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    self.places[value.grad_fn._sequence_nr()] = tag
        return result

    def follow_backward(self, roots: Sequence[torch.Tensor]) -> None:
        """Make every backward node traced from now on carry its forward operator's tag.

        Autograd numbers its nodes in forward order; a node inside a composite operator belongs to
        the next tag at or after its number.
        """
        numbers = sorted(self.places)
        stack = [t.grad_fn for t in roots]
        seen = set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            stack.extend(following for following, _ in node.next_functions)
            at = bisect.bisect_left(numbers, node._sequence_nr())
            tag = self.places[numbers[at]] if at < len(numbers) else "|"
            node.register_prehook(lambda _, tag=tag: _set_tag(f"{BACKWARD}|{tag}"))
        _set_tag(f"{BACKWARD}||")

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


def _place() -> str:
    """The innermost line of the user's."""
    frame = sys._getframe(1)
    while frame is not None and inner(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "unknown place"


def _set_tag(tag: str) -> None:
    fx_traceback.current_meta["stack_trace"] = tag


@contextmanager
def preserved_meta() -> Iterator[None]:
    with fx_traceback.preserve_node_meta():
        before = dict(fx_traceback.current_meta)
        try:
            yield
        finally:
            fx_traceback.current_meta.clear()
            fx_traceback.current_meta.update(before)


@contextmanager
def without_logs() -> Iterator[None]:
    """What fails while tracing is told in one named error, not in pages."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
