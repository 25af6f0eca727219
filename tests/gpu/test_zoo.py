"""Every subgraph of the zoo on a CUDA device, at the CPU's size and at the GPU's."""

from __future__ import annotations

import gc

import pytest
import torch
from zoo_checks import missed

from megafuse import Options, zoo
from megafuse.subgraphs import Settings
from megafuse.tools.candidate import Candidate
from megafuse.zoo import Size

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"
)


@pytest.mark.parametrize("size, seeds", [("cpu", 8), ("gpu", 1)])
@pytest.mark.parametrize("name", zoo.ENTRIES)
def test_entry(name: str, size: Size, seeds: int) -> None:
    settings = Settings(None, torch.bfloat16, torch.device("cuda"))
    report = Candidate(zoo.subgraph(name, settings, size), Options()).check(seeds)
    gc.collect()
    torch.cuda.empty_cache()
    assert not missed(report), str(report)
