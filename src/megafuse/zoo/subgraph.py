"""An entry of the zoo as a subgraph that the tools can check, time and explain."""

from __future__ import annotations

import torch

from megafuse.subgraphs import FactorySubgraph, Settings, SubgraphError
from megafuse.zoo.entry import ENTRIES, Example, Size


def subgraph(name: str, settings: Settings, size: Size | None = None) -> FactorySubgraph:
    """The entry `name` on the settings' device; `size` by default the one made for it.

    Modules and inputs are made on that device in float32 and then brought to the settings' dtype.
    Raises SubgraphError for a name that is none.
    """
    if name not in ENTRIES:
        raise SubgraphError(f"the zoo has no {name!r}: it holds {', '.join(ENTRIES)}")
    entry = ENTRIES[name]
    chosen: Size = size or ("cpu" if settings.device.type == "cpu" else "gpu")

    def case() -> Example:
        with torch.device(settings.device):
            return entry.case(chosen)

    return FactorySubgraph(f"zoo:{name}", case, settings)
