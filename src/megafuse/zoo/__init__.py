"""Subgraphs in the shapes people use, written from scratch: what coverage is measured on.

Each entry is a small module with a `case` at two sizes. Nothing in the compiler imports this.
"""

from megafuse.zoo import language, ranking, vision
from megafuse.zoo.entry import ENTRIES, Entry, Size
from megafuse.zoo.subgraph import subgraph

__all__ = ["ENTRIES", "Entry", "Size", "language", "ranking", "subgraph", "vision"]
