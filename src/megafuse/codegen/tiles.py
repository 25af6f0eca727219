"""How a Hopper product is cut into pieces of work, and which cut is predicted the fastest.

Everything here is a pure function of sizes and the number of multiprocessors, never of a timing:
how often the sum over k is cut decides in which order it is added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

_SHARED_LIMIT = 227 * 1024
_BLOCK_K, _MOST_STAGES = 64, 8


@dataclass(frozen=True)
class Staging:
    """What a consumer's chunks pass through on their way in and out: `places` of them, `depth`
    tensors deep, 64 rows of `columns` each, with room for `sums` column sums."""

    places: int
    depth: int = 1
    sums: int = 0
    columns: int = 64

    @property
    def nbytes(self) -> int:
        """Of both consumers; a column sum has a float of every warp and column."""
        chunk = self.depth * 64 * self.columns * 2
        return 2 * self.places * (chunk + self.sums * 4 * self.columns * 4)


@dataclass(frozen=True)
class TileConfig:
    """The part of C a block computes at a time: two warpgroups of 64 rows x `width` columns each,
    one above the other (split "m") or side by side ("n")."""

    split: Literal["m", "n"]
    width: int

    @property
    def m(self) -> int:
        return 128 if self.split == "m" else 64

    @property
    def n(self) -> int:
        return self.width if self.split == "m" else 2 * self.width

    @property
    def stage_bytes(self) -> int:
        """One k-block of A and of B, in 16-bit elements."""
        return (self.m + self.n) * 2 * _BLOCK_K

    def staging(self, depth: int = 0, sums: int = 0) -> Staging:
        """depth, sums: of a tail; a plain result has two places where it has two chunks."""
        return Staging(2, depth, sums, 32) if depth else Staging(min(2, self.width // 64))

    def fixed_bytes(self, row_bytes: int, stages: int, staging: Staging) -> int:
        """Shared memory beside the pipeline stages; row_bytes: of one column's row operands."""
        barriers = 2 * stages + 4 * staging.places + 2
        return staging.nbytes + row_bytes * self.n + 8 * barriers

    def stages(self, row_bytes: int, staging: Staging | None = None) -> int:
        """The deepest pipeline that fits."""
        staging = staging or self.staging()
        for stages in range(_MOST_STAGES, 2, -1):
            fixed = self.fixed_bytes(row_bytes, stages, staging)
            if stages * self.stage_bytes + fixed <= _SHARED_LIMIT:
                return stages
        return 2

    def shared_bytes(self, row_bytes: int, staging: Staging | None = None) -> int:
        staging = staging or self.staging()
        stages = self.stages(row_bytes, staging)
        return stages * self.stage_bytes + self.fixed_bytes(row_bytes, stages, staging)

    def __str__(self) -> str:
        return f"{self.m}x{self.n}"


TILES = (TileConfig("m", 256), TileConfig("m", 128), TileConfig("n", 128), TileConfig("n", 64))
"""Largest first: of tiles predicted equal the largest is taken."""

# Measured on an H200 with a 128x256 tile: 1030 cycles a k-block (the tensor cores' own 1024) and
# about 1850 a tile. A smaller tile needs its share of the products, but no less time than its
# operands take to arrive, at the 48 bytes a cycle that a multiprocessor was seen to get. Of the
# cost of a tile a third is taken to be fixed (filling the pipeline, the last barrier).
_BLOCK_CYCLES, _TILE_CYCLES, _FIXED_CYCLES = 1030.0, 1230.0, 620.0
_BYTES_PER_CYCLE = 48.0
_FULL = 128 * 256


# A product whose k's are split writes float32 sums and a second kernel adds them up. Of those sums
# (written and read) a multiprocessor is taken to move 19 bytes a cycle, 2.5 KB for all of an H200;
# of operands from memory 21. A thread of the second kernel has 16 loads on their way at a time
# (IN_FLIGHT of finish.cuh), and its launch costs 3 us. Measured, split products took a tenth more
# cycles beside one pass than predicted, so a split has to promise that much and a little more.
_SUM_BYTES, _MEMORY_BYTES = 19.0, 21.0
_LAUNCH_CYCLES, _IN_FLIGHT, _LATENCY_CYCLES = 5000.0, 16, 800.0
_DOUBT = 1.12

LEAST_BLOCKS = 8
"""Fewest k-blocks of a split (the last one has what is left)."""
MOST_WORKSPACE = 64 << 20
"""Most bytes that the sums of all splits may take."""
_MOST_WAVES = 4  # more pieces than that balance nothing further


@dataclass(frozen=True)
class Cut:
    """A product in pieces: tiles of C, the k-blocks of each in `splits` runs of equal length, the
    last one what is left. splits: a value of `whole_splits`; 1 is the product in one pass."""

    tile: TileConfig
    splits: int = 1

    def pieces(self, batch: int, m: int, n: int) -> int:
        """How many there are for C of [batch, m, n]."""
        return self.splits * batch * -(-m // self.tile.m) * -(-n // self.tile.n)

    def __str__(self) -> str:
        return str(self.tile) if self.splits == 1 else f"{self.tile} / {self.splits}"


def k_blocks(k: int) -> int:
    """Steps of the pipeline for a sum over `k`."""
    return -(-k // _BLOCK_K)


def whole_splits(k: int, splits: int) -> int:
    """At most `splits` of them, so many that runs of equal length leave none empty."""
    blocks = max(1, k_blocks(k))
    return -(-blocks // -(-blocks // max(1, min(splits, blocks))))


def cycles(cut: Cut, batch: int, m: int, n: int, k: int, sm_count: int) -> float:
    """Predicted cycles of one product: waves of blocks x the time of one piece, and the second
    kernel where k is split."""
    tile, splits = cut.tile, cut.splits
    share = tile.m * tile.n / _FULL
    block = max(_BLOCK_CYCLES * share, tile.stage_bytes / _BYTES_PER_CYCLE)
    once = -(-k_blocks(k) // splits) * block + _TILE_CYCLES * share + _FIXED_CYCLES
    time = -(-cut.pieces(batch, m, n) // sm_count) * once
    if splits == 1:
        return time
    # Splits are for few tiles and a long k, where memory may be slower than the tensor cores.
    memory = 2 * batch * k * (m + n) / (_MEMORY_BYTES * sm_count)
    moved = 2 * 4 * splits * batch * m * n / (_SUM_BYTES * sm_count)
    finish = _LAUNCH_CYCLES + max(moved, -(-splits // _IN_FLIGHT) * _LATENCY_CYCLES)
    return max(time, memory) + finish


def split_counts(tile: TileConfig, batch: int, m: int, n: int, k: int, sm_count: int) -> list[int]:
    """How often the k's of a product may be split, 1 first."""
    tiles = Cut(tile).pieces(batch, m, n)
    if tiles == 0:
        return [1]
    most = min(
        k_blocks(k) // LEAST_BLOCKS,
        MOST_WORKSPACE // (4 * batch * m * n),
        _MOST_WAVES * sm_count // tiles,
    )
    return sorted({1} | {whole_splits(k, splits) for splits in range(2, most + 1)})


@cache
def ranked(batch: int, m: int, n: int, k: int, sm_count: int) -> tuple[Cut, ...]:
    """Every tile, with the number of splits that suits it best, fastest by prediction first. All
    tiles sum over k in the same order, so that the splits alone decide the result's last bits."""

    def doubted(cut: Cut) -> float:
        time = cycles(cut, batch, m, n, k, sm_count)
        return time if cut.splits == 1 else time * _DOUBT

    best = (
        min((Cut(t, s) for s in split_counts(t, batch, m, n, k, sm_count)), key=doubted)
        for t in TILES
    )
    return tuple(sorted(best, key=doubted))
