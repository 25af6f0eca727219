"""Stand-ins for the compiler, so that the tools are tested without it.

`install(monkeypatch, change)` puts a `megafuse.api` in place whose fused module runs a copy of the
original in eager, sharing its parameters, with a made-up plan; `change` may break the copy.
"""

import copy
import sys
import types

import torch
from torch import nn

from megafuse.fusion.summary import MatmulShape, PlanSummary, RegionSummary


class FusedModule(nn.Module):
    def __init__(self, original, options=None, change=None):
        super().__init__()
        memo = {id(p): p for p in original.parameters()}  # the copy keeps the same parameters
        inner = copy.deepcopy(original, memo)
        self.__dict__["inner"] = change(inner) or inner if change else inner
        self.__dict__["original"] = original
        self.options = options
        for name, child in original.named_children():
            self.add_module(name, child)
        for name, parameter in original.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)

    def build(self, *inputs, progress=None, **kwargs):
        if progress:
            progress("building", 1, 1)

    def summary(self, *inputs, **kwargs):
        return plan()


def plan():
    def region(name, kind, direction, read, written, kernels):
        return RegionSummary(
            name, direction, kind, ("add",), read, written, 10, 0.01, 1, kernels, "because"
        )

    regions = (
        region("F1", "group", "forward", 4000, 2000, ("f1_norm",)),
        region("F2", "matmul", "forward", 8000, 4000, ()),
        region("B1", "rows", "backward", 4000, 2000, ("b1_norm",)),
    )
    products = (
        MatmulShape(2, 8, 4, 16, False, False, torch.float32, "forward"),
        MatmulShape(2, 8, 16, 4, False, True, torch.float32, "backward"),
        MatmulShape(2, 16, 4, 8, True, False, torch.float32, "backward"),
    )
    return PlanSummary(regions, 60_000, 24_000, 3 * 2 * 2 * 8 * 4 * 16, 6000, products)


def install(monkeypatch, change=None):
    api = types.ModuleType("megafuse.api")
    api.FusedModule = FusedModule
    api.fuse = lambda module, *args, options=None, **kwargs: FusedModule(module, options, change)
    api.explain = lambda fused, *args, html=None, **kwargs: "PLAN: F1, F2, B1"
    monkeypatch.setitem(sys.modules, "megafuse.api", api)
    return api
