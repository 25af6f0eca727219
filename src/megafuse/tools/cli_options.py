"""The options all commands share, and how a named error leaves the program. Imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from megafuse.tools.candidate import Candidate

F = TypeVar("F", bound=Callable[..., Any])

DTYPES = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "float32": "float32",
    "fp32": "float32",
}


def parse_shape(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """Read comma-separated positive whole numbers. Raises click.BadParameter."""
    if value is None:
        return None
    try:
        sizes = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list like 64,16,128,2") from None
    if min(sizes) < 1:
        raise click.BadParameter(f"sizes must be positive: got {value}")
    return sizes


@dataclass(frozen=True)
class Common:
    """The shared options as given."""

    subgraph: str
    shape: tuple[int, ...] | None
    dtype: str | None
    tf32: bool
    device: str
    seed: int
    rounding: str
    memory: str

    def candidate(self) -> Candidate:
        """Load the subgraph and set the TF32 switch. Raises SubgraphError and its like."""
        # PyTorch's profiler otherwise writes lines of its own among the tables.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        import torch

        from megafuse.config import Options
        from megafuse.subgraphs import Settings, SubgraphError, load
        from megafuse.tools.candidate import Candidate

        kind = device_kind(self.device)
        dtype = getattr(torch, DTYPES[self.dtype]) if self.dtype else None
        if self.tf32 and dtype is not torch.float32:
            raise SubgraphError("--tf32 is a way to multiply float32: add --dtype float32")
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        settings = Settings(self.shape, dtype, torch.device(kind), self.seed)
        options: Any = {"rounding": self.rounding, "memory": self.memory}
        return Candidate(load(self.subgraph, settings), Options(**options), self.seed)

    def to_json(self) -> dict[str, Any]:
        """The options as given, for a results file."""
        return dict(vars(self))

    def arguments(self) -> list[str]:
        """The same options as a command line, for a child process."""
        words = [self.subgraph, "--device", self.device, "--seed", str(self.seed)]
        words += ["--rounding", self.rounding, "--memory", self.memory]
        if self.shape:
            words += ["--shape", ",".join(map(str, self.shape))]
        if self.dtype:
            words += ["--dtype", self.dtype]
        return words + (["--tf32"] if self.tf32 else [])


def device_kind(device: str) -> str:
    """ "cpu" or "cuda" for what --device says. Raises SubgraphError without a GPU to be had."""
    import torch

    from megafuse.subgraphs import SubgraphError

    available = torch.cuda.is_available()
    kind = device if device != "auto" else ("cuda" if available else "cpu")
    if kind == "cuda" and not available:
        raise SubgraphError(
            "--device cuda: PyTorch sees no GPU here; `megafuse doctor` says what is missing, "
            "--device cpu runs the same generated source"
        )
    return kind


def common(command: F) -> F:
    """Give a command SUBGRAPH and the shared options, collected into one `common` argument."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        fields = {name: kwargs.pop(name) for name in Common.__dataclass_fields__}
        return command(*args, common=Common(**fields), **kwargs)

    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    wrapper.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    options = [
        click.argument("subgraph", default="rankmixer"),
        click.option(
            "--shape",
            metavar="B,T,D,k",
            callback=parse_shape,
            help="Default: 1024,64,1280,2 on a GPU, 32,16,128,2 on a CPU; k may be left out.",
        ),
        click.option(
            "--dtype",
            type=click.Choice(list(DTYPES)),
            help="Precision. Default: bfloat16, or a file's own.",
        ),
        click.option("--tf32", is_flag=True, help="Let CUDA multiply float32 in TF32."),
        click.option(
            "--device",
            type=click.Choice(["auto", "cpu", "cuda"]),
            default="auto",
            help="Default: cuda when there is a GPU.",
        ),
        click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True),
        click.option(
            "--rounding",
            type=click.Choice(["fp32", "eager"]),
            default="fp32",
            show_default=True,
            help="Keep float32 inside a region, or reproduce each of eager's casts.",
        ),
        click.option(
            "--memory",
            type=click.Choice(["balanced", "min"]),
            default="balanced",
            show_default=True,
            help="What to keep for backward.",
        ),
        traceback_option,
    ]
    decorated: Any = wrapper
    for option in reversed(options):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


def _remember_traceback(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.find_root().meta["megafuse.traceback"] = True


traceback_option = click.option(
    "--traceback",
    is_flag=True,
    expose_value=False,
    callback=_remember_traceback,
    help="Show where a named error came from; so does MEGAFUSE_TRACEBACK=1.",
)


class Cli(click.Group):
    """A group whose commands end a named error in one line and exit status 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except Exception as error:
            message = _one_line(error)
            asked = ctx.meta.get("megafuse.traceback") or os.environ.get("MEGAFUSE_TRACEBACK")
            if message is None or (asked and asked != "0"):
                raise
            click.echo(message, err=True)
            sys.exit(2)


def _one_line(error: Exception) -> str | None:
    """How a named error is shown; None for one that is a defect and deserves its traceback."""
    from megafuse.blame import met_in_users_code, users_line
    from megafuse.errors import MegafuseError

    name = type(error).__name__
    if isinstance(error, MegafuseError):
        return f"megafuse: {name}: {error}"
    if name == "OutOfMemoryError":
        first = str(error).partition(". ")[0]
        return f"megafuse: {name}: {first}. Ask for a smaller --shape, or --memory min."
    if met_in_users_code(error):
        first = str(error).strip().partition("\n")[0]
        return f"megafuse: {name} at {users_line(error)}: {first} (--traceback shows more)"
    return None
