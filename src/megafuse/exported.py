"""Programs that torch recorded: `torch.export` programs and `fx.GraphModule`s."""

from __future__ import annotations

import re
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

_TORCH = r"[/\\]torch[/\\](nn|_?functorch|_dynamo|autograd|utils|_?export)[/\\]"
"""Files of PyTorch, wherever it was installed when the program was recorded."""


def module_of(program: ExportedProgram) -> nn.Module:
    """The module of `program`, with its own parameters and buffers.

    Export asserts the recorded dtype and device at each cast; they are dropped, so that another
    precision or device can run. Constants of the program become buffers (not in its state_dict), so
    that they follow the module. Its checks of input shapes stay.
    """
    module = program.module()
    for child in module.modules():
        if isinstance(child, fx.GraphModule):
            _drop_metadata_asserts(child)
        for name, value in list(vars(child).items()):
            if isinstance(value, Tensor):
                delattr(child, name)
                child.register_buffer(name, value, persistent=False)
    return module


def _drop_metadata_asserts(module: fx.GraphModule) -> None:
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            module.graph.erase_node(node)
    module.recompile()


def recorded_place(frame: FrameType) -> str | None:
    """file:line of the user's code that a running GraphModule recorded for the line `frame` is at,
    an empty text where it recorded none; None for any other frame."""
    module = frame.f_locals.get("self")
    if not isinstance(module, fx.GraphModule):
        return None
    lines = module._lineno_map or {}
    index = lines.get(frame.f_lineno - frame.f_code.co_firstlineno)
    return "" if index is None else place(list(module.graph.nodes)[index])


def place(node: fx.Node) -> str:
    """file:line of the user's code that `node` comes from, or an empty text."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    frames = [f for f in frames if not re.search(_TORCH, f[0])] or frames
    return f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else ""
