"""Every subgraph of the zoo, forward and backward, on generated host code."""

from __future__ import annotations

import pytest
import torch
from zoo_checks import missed

from megafuse import Options, zoo
from megafuse.subgraphs import Settings
from megafuse.tools.candidate import Candidate


@pytest.mark.parametrize("name", zoo.ENTRIES)
def test_entry(name: str) -> None:
    """bfloat16, then float32, three seeds each, by the policy of docs/proposal.md."""
    candidate = Candidate(zoo.subgraph(name, Settings(None, torch.bfloat16)), Options())
    report = candidate.check(3)
    assert [s.dtype for s in report.stages] == [torch.bfloat16, torch.float32]
    parameters = sum(p.requires_grad for p in candidate.make(0)[0].module.parameters())
    assert all(len(s.tensors) > parameters for s in report.stages)
    assert not missed(report), str(report)


def test_there_are_entries_enough() -> None:
    assert len(zoo.ENTRIES) >= 20
    for name, entry in zoo.ENTRIES.items():
        assert entry.name == name and entry.__doc__ and len(entry.__doc__.splitlines()[0]) < 100


@pytest.mark.parametrize("name", zoo.ENTRIES)
def test_both_sizes_describe_one_call(name: str) -> None:
    """The GPU size is made on meta tensors: shapes only."""
    sizes = []
    for size in ("cpu", "gpu"):
        case = zoo.subgraph(name, Settings(device=torch.device("meta")), size).case(0)
        case.module(*case.args)
        tensors = [*case.module.parameters(), *(a for a in case.args if torch.is_tensor(a))]
        sizes.append((len(tensors), sum(t.numel() for t in tensors)))
    (few, small), (many, large) = sizes
    assert large > 100 * small
    assert few == many or name == "mixer_module_list"
