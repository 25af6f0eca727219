import textwrap

import pytest
import torch
from torch import nn

from megafuse import workload
from megafuse.subgraphs import Settings, SubgraphError, load
from megafuse.tools.check import check
from megafuse.workload import WorkloadError

SMALL = (3, 4, 16, 2)


@pytest.mark.parametrize("name", ["rankmixer", "dense_ffn"])
def test_workload_subgraphs_are_seeded_as_the_runner_does(name):
    case = load(name, Settings(shape=SMALL, seed=5)).case(5)
    assert case.args[0].shape == case.grad_output.shape == (3, 4, 16)
    assert case.args[0].dtype == torch.bfloat16
    assert case.samples == 3
    generator = torch.Generator().manual_seed(1005)
    expected = torch.randn(3, 4, 16, dtype=torch.bfloat16, generator=generator)
    assert torch.equal(case.grad_output, expected)
    torch.manual_seed(5)
    block = workload._import(workload.ENTRY).RankMixerBlockFwd(4, 16, 2, dtype=torch.bfloat16)
    assert torch.equal(case.args[0], torch.randn(3, 4, 16, dtype=torch.bfloat16))
    for key, value in case.module.state_dict().items():
        assert torch.equal(value, block.state_dict()[key])
    assert case.module(*case.args, **case.kwargs).shape == (3, 4, 16)


def test_dense_ffn_equals_its_definition():
    case = load("dense_ffn", Settings(shape=SMALL, dtype=torch.float32)).case(0)
    m, x = case.module, case.args[0]
    u, g = (torch.einsum("btd,tdh->bth", x, m.w1) + m.b1).chunk(2, -1)
    hidden = m.norm_x(u) * nn.functional.silu(m.norm_gate(g))
    expected = torch.einsum("bth,thd->btd", hidden, m.wout) + m.bout
    torch.testing.assert_close(m(x), expected, rtol=1e-4, atol=1e-4)


def test_another_seed_changes_values_and_another_dtype_the_precision():
    subgraph = load("rankmixer", Settings(shape=SMALL))
    a, b, c = subgraph.case(0), subgraph.case(1), subgraph.case(0, torch.float32)
    assert not torch.equal(a.args[0], b.args[0])
    assert c.args[0].dtype == c.module.w1.dtype == torch.float32


def test_the_workload_is_found_by_environment_variable(monkeypatch, tmp_path):
    (tmp_path / "rank_mixer_src").mkdir()
    monkeypatch.setenv("MEGAFUSE_WORKLOAD", str(tmp_path))
    assert workload.folder() == tmp_path
    monkeypatch.setenv("MEGAFUSE_WORKLOAD", str(tmp_path / "nowhere"))
    with pytest.raises(WorkloadError, match="set MEGAFUSE_WORKLOAD"):
        workload.folder()


def test_an_illegal_shape_names_its_rule():
    with pytest.raises(WorkloadError, match="T to divide D"):
        load("rankmixer", Settings(shape=(2, 3, 16))).case(0)
    with pytest.raises(WorkloadError, match="k must be 2 or 3"):
        load("rankmixer", Settings(shape=(2, 4, 16, 5))).case(0)


@pytest.fixture
def factory(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        textwrap.dedent("""
            import torch

            def plain():
                return torch.nn.Linear(4, 2), torch.randn(3, 4, requires_grad=True)

            def keywords(dtype=torch.float16, shape=(2, 4), seed=None):
                layer = torch.nn.Linear(4, 2, dtype=dtype)
                return layer, {"input": torch.full(shape, float(seed), dtype=dtype)}

            def wrong():
                return 3

            def function():
                return torch.sin, (torch.zeros(3),)

            number = 3
            """)
    )
    return path


def test_a_factory_file(factory):
    subgraph = load(f"{factory}:plain", Settings())
    a, again, b = subgraph.case(0), subgraph.case(0), subgraph.case(1)
    assert torch.equal(a.args[0], again.args[0])
    assert torch.equal(a.module.weight, again.module.weight)
    assert not torch.equal(a.args[0], b.args[0])
    half = subgraph.case(0, torch.bfloat16)
    assert half.module.weight.dtype == half.args[0].dtype == torch.bfloat16
    assert half.args[0].requires_grad


def test_a_factory_gets_the_keywords_it_names(factory):
    settings = Settings(shape=(5, 4), dtype=torch.bfloat16)
    case = load(f"{factory}:keywords", settings).case(7)
    assert case.kwargs["input"].shape == (5, 4)
    assert case.kwargs["input"].dtype == torch.bfloat16
    assert case.kwargs["input"][0, 0] == 7


@pytest.mark.parametrize(
    ("spec", "message"),
    [("mine.py:plain", "takes no argument named shape"), ("mine.py:gone", "no function"),
     ("mine.py:number", "no function"), ("mine.py:wrong", "must return"),
     ("mine.py:function", "torch.nn.Module is needed"), ("gone.py:f", "no such file"),
     ("mine.py", "name the function too"), ("gone.pt2", "no such file"),
     ("nonsense", "expected rankmixer, dense_ffn")],
)  # fmt: skip
def test_errors_say_what_was_expected(factory, monkeypatch, spec, message):
    monkeypatch.chdir(factory.parent)
    shape = (1, 2) if spec == "mine.py:plain" else None
    with pytest.raises(SubgraphError, match=message):
        load(spec, Settings(shape=shape)).case(0)


def test_a_file_that_does_not_import(tmp_path):
    (tmp_path / "broken.py").write_text("import torch\n1 / 0\n")
    with pytest.raises(SubgraphError, match="ZeroDivisionError"):
        load(f"{tmp_path}/broken.py:f", Settings())


def test_an_exported_program(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, scale):
            return torch.tanh(self.layer(x.float())) * scale

    torch.manual_seed(0)
    example = (torch.randn(5, 8), torch.ones(8))
    path = tmp_path / "program.pt2"
    torch.export.save(torch.export.export(Net(), example), path)
    subgraph = load(str(path), Settings())
    case = subgraph.case(0)
    assert torch.equal(case.args[0], example[0])
    assert case.args[0].requires_grad
    other = subgraph.case(3)
    assert not torch.equal(other.args[0], example[0])
    assert torch.equal(case.module.state_dict()["layer.weight"],
                       other.module.state_dict()["layer.weight"])  # fmt: skip
    half = subgraph.case(0, torch.bfloat16)
    report = check(case.module, case.module, *case.args)
    assert report.passed, str(report)
    assert half.args[0].dtype == torch.bfloat16
    with pytest.raises(SubgraphError, match="exported with fixed sizes"):
        load(str(path), Settings(shape=(1, 2))).case(0)


def test_a_file_that_is_no_program(tmp_path):
    (tmp_path / "no.pt2").write_bytes(b"nothing")
    with pytest.raises(SubgraphError, match="is not a torch"):
        load(str(tmp_path / "no.pt2"), Settings()).case(0)
