"""Numbers as people read them, and the console they are printed to."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

WIDTH = 100


def console(stderr: bool = False) -> Console:
    """A console at least 100 columns wide, so that no number is cut off in a pipe."""
    width = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
    return Console(width=max(width, WIDTH), stderr=stderr, highlight=False)


def table(title: str, *columns: str, caption: str | None = None) -> Table:
    """A plain table: the first column left, the others right, nothing wrapped."""
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption=caption,
        caption_justify="left",
        caption_style="dim",
        box=None,
        padding=(0, 1),
        header_style="dim",
    )
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left", no_wrap=True)
    return made


@contextmanager
def progress(target: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Show (message, done, total) calls as one live bar; silent where output is not a terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=target,
        transient=True,
        disable=not target.is_terminal,
    )
    with bar:
        task = bar.add_task("starting", total=None)

        def update(message: str, done: int, total: int) -> None:
            bar.update(task, description=message, completed=done, total=max(total, 1))

        yield update


def milliseconds(value: float) -> str:
    """Milliseconds with about four significant digits."""
    return f"{value:.4f}" if value < 1 else f"{value:.3f}" if value < 100 else f"{value:.1f}"


def gigabytes(value: float) -> str:
    """Bytes as GB, or MB below 0.1 GB (decimal: what bandwidths are stated in)."""
    if value < 1e3:
        return f"{value:.0f} B"
    if value < 1e5:
        return f"{value / 1e3:.1f} kB"
    return f"{value / 1e9:.3f} GB" if value >= 1e8 else f"{value / 1e6:.2f} MB"


def mebibytes(value: float) -> str:
    """Bytes as MiB, the unit allocators are read in."""
    mib = value / (1 << 20)
    return f"{mib:.2f} MiB" if mib < 100 else f"{mib:.0f} MiB"


def rate(value: float) -> str:
    """A count a second, with thousands separated."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def tera(value: float) -> str:
    """Operations a second as TFLOP/s, or GFLOP/s below 0.1."""
    return f"{value / 1e12:.1f} TFLOP/s" if value >= 1e11 else f"{value / 1e9:.2f} GFLOP/s"


def operations(value: float) -> str:
    """A number of floating-point operations as GFLOP, or MFLOP below 0.1."""
    return f"{value / 1e9:.2f} GFLOP" if value >= 1e8 else f"{value / 1e6:.2f} MFLOP"


def counted(number: int, what: str) -> str:
    """`1 region`, `2 regions`."""
    return f"{number} {what}{'s' * (number != 1)}"


def ratio(value: float) -> str:
    return f"{value:.2f}x"
