"""Resolve SUBGRAPH on a command line to something that builds seeded modules and inputs."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megafuse import workload
from megafuse.blame import users_line
from megafuse.errors import MegafuseError
from megafuse.exported import module_of

WORKLOADS = {"rankmixer": "RankMixer block", "dense_ffn": "dense per-token FFN"}


class SubgraphError(MegafuseError):
    """SUBGRAPH names nothing that can be loaded, or an option does not apply to it."""


@dataclass(frozen=True)
class Settings:
    """What the common options say. `shape` and `dtype` are None where the user left them out."""

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0


@dataclass
class Case:
    """A module with one set of example inputs.

    `grad_output` is the upstream gradient of the (single) output; None lets the tool draw one.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    grad_output: Tensor | None = None

    @property
    def samples(self) -> int:
        """The leading extent of the first tensor input: what "samples/s" counts."""
        for leaf in pytree.tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, Tensor) and leaf.dim():
                return leaf.shape[0]
        return 1


class Subgraph(Protocol):
    """Something to fuse: the same structure for every seed, fresh values for each.

    `name` is how it was asked for, `title` says in one line what will run.
    """

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def settings(self) -> Settings: ...

    def case(self, seed: int, dtype: torch.dtype | None = None) -> Case:
        """Build module and inputs from `seed`; `dtype` overrides the one asked for."""
        ...


@dataclass(frozen=True)
class WorkloadSubgraph:
    """`rankmixer` or `dense_ffn`, from the workload package."""

    name: str
    settings: Settings

    @property
    def shape(self) -> tuple[int, ...]:
        return self.settings.shape or workload.default_shape(self.settings.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.settings.dtype or torch.bfloat16

    @property
    def title(self) -> str:
        sizes = zip(workload.SHAPE_NAMES, workload.require_shape(self.shape), strict=True)
        return (
            f"{WORKLOADS[self.name]}, {' '.join(f'{n}={v}' for n, v in sizes)}, "
            f"{str(self.dtype).removeprefix('torch.')}, {self.settings.device.type}"
        )

    def case(self, seed: int, dtype: torch.dtype | None = None) -> Case:
        built = workload.build(
            self.name, self.shape, dtype or self.dtype, self.settings.device, seed
        )
        kwargs = {"overlap": "none"} if self.name == "rankmixer" else {}
        return Case(built.module, (built.inputs,), kwargs, built.grad_output)


@dataclass(frozen=True)
class FactorySubgraph:
    """`file.py:factory`: a function that returns (module, example inputs).

    It is called after the process seed is set, with those of the keywords seed, device, dtype and
    shape that its signature names. Inputs may be one tensor, a tuple or a dict of keywords.
    """

    name: str
    factory: Callable[..., Any]
    settings: Settings

    @property
    def title(self) -> str:
        return f"{self.name}, {self.settings.device.type}"

    def case(self, seed: int, dtype: torch.dtype | None = None) -> Case:
        wanted = dtype or self.settings.dtype
        accepted = inspect.signature(self.factory).parameters
        offered = {"seed": seed, "device": self.settings.device, "dtype": wanted}
        if self.settings.shape is not None:
            if "shape" not in accepted:
                raise SubgraphError(f"--shape: {self.name} takes no argument named shape")
            offered["shape"] = self.settings.shape
        given = {k: v for k, v in offered.items() if k in accepted and v is not None}
        torch.manual_seed(seed)
        try:
            result = self.factory(**given)
        except Exception as error:  # the user's function may fail in any way
            raise SubgraphError(f"{self.name} raised {_told(error)}") from error
        if not isinstance(result, tuple | list) or len(result) != 2:
            got = (
                f"{len(result)} values"
                if isinstance(result, tuple | list)
                else "a " + type(result).__name__
            )
            raise SubgraphError(
                f"{self.name} must return (module, example inputs), and returned {got}"
            )
        module, inputs = result
        if not isinstance(module, nn.Module):
            raise SubgraphError(
                f"{self.name} returned a {type(module).__name__} where a torch.nn.Module is needed"
            )
        args, kwargs = _as_call(inputs)
        return _placed(Case(module, args, kwargs), wanted, self.settings.device)


@dataclass(frozen=True)
class ExportedSubgraph:
    """A `torch.export` program with its recorded parameters and example inputs.

    Seeds beyond the first redraw the floating-point inputs with the recorded mean and deviation;
    the parameters stay as recorded.
    """

    name: str
    path: Path
    settings: Settings

    @property
    def title(self) -> str:
        return f"{self.name}, {self.settings.device.type}"

    def case(self, seed: int, dtype: torch.dtype | None = None) -> Case:
        if self.settings.shape is not None:
            raise SubgraphError(f"--shape: {self.name} was exported with fixed sizes")
        try:
            program = torch.export.load(str(self.path))
        except Exception as error:  # torch raises several unrelated types for a bad archive
            first = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
            raise SubgraphError(f"{self.path} is not a torch.export program: {first}") from error
        if program.example_inputs is None:
            raise SubgraphError(f"{self.path} was saved without example inputs: export it again")
        args, kwargs = program.example_inputs
        module = module_of(program)
        if seed != self.settings.seed:
            generator = torch.Generator().manual_seed(seed)
            args, kwargs = pytree.tree_map(lambda x: _redrawn(x, generator), (args, kwargs))
        args, kwargs = pytree.tree_map(_with_grad, (args, kwargs))
        case = Case(module, tuple(args), dict(kwargs))
        return _placed(case, dtype or self.settings.dtype, self.settings.device)


def load(spec: str, settings: Settings) -> Subgraph:
    """Resolve `rankmixer`, `dense_ffn`, `zoo:NAME`, `file.py:factory` or `program.pt2`.

    Raises SubgraphError saying what was expected when `spec` is none of them.
    """
    if spec in WORKLOADS:
        return WorkloadSubgraph(spec, settings)
    if spec.startswith("zoo:"):
        from megafuse import zoo

        return zoo.subgraph(spec.removeprefix("zoo:"), settings)
    path_text, _, attribute = spec.rpartition(":")
    if path_text.endswith(".py"):
        return FactorySubgraph(spec, _factory(Path(path_text), attribute), settings)
    if spec.endswith(".pt2"):
        if not Path(spec).is_file():
            raise SubgraphError(f"{spec}: no such file")
        return ExportedSubgraph(Path(spec).name, Path(spec), settings)
    if spec.endswith(".py"):
        raise SubgraphError(f"{spec}: name the function too, as in {spec}:make_block")
    raise SubgraphError(
        f"unknown subgraph {spec!r}: expected {', '.join(WORKLOADS)}, zoo:NAME, file.py:factory "
        "or program.pt2"
    )


def _factory(path: Path, attribute: str) -> Callable[..., Any]:
    if not path.is_file():
        raise SubgraphError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SubgraphError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's file may fail in any way
        raise SubgraphError(f"{path} does not import: {_told(error)}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise SubgraphError(f"{path} has no function named {attribute!r}")
    return factory  # type: ignore[no-any-return]


def _told(error: Exception) -> str:
    """An error of the user's code with its line."""
    message = str(error).strip().partition("\n")[0]
    place = users_line(error)
    where = f" at {place}" if place and place not in message else ""
    return f"{type(error).__name__}{where}{f': {message}' if message else ''}"


def _as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _placed(case: Case, dtype: torch.dtype | None, device: torch.device) -> Case:
    """Bring module and inputs to `device` and, where floating point, to `dtype`."""

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        to = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return value.detach().to(device=device, dtype=to).requires_grad_(value.requires_grad)

    args, kwargs = pytree.tree_map(move, (case.args, case.kwargs))
    module = case.module.to(device) if dtype is None else case.module.to(device, dtype)
    return Case(module, args, kwargs, case.grad_output)


def _with_grad(value: Any) -> Any:
    """A saved program forgets requires_grad: ask for the gradient of every floating-point input."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _redrawn(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    wide = value.detach().double().cpu()
    noise = torch.randn(wide.shape, dtype=torch.float64, generator=generator)
    deviation = wide.std() if wide.numel() > 1 else wide.new_tensor(1.0)
    return (noise * deviation + wide.mean()).to(value.dtype).to(value.device)
