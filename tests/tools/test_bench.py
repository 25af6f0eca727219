import json

import pytest
import standin
import torch

from megafuse.config import Options
from megafuse.subgraphs import Settings, load
from megafuse.tools.bench import measure, write_json
from megafuse.tools.candidate import Candidate
from megafuse.tools.rivals import (
    RivalError,
    bare_products,
    build_rival,
    default_rivals,
    parse_rivals,
)
from megafuse.tools.tables import console

CPU = torch.device("cpu")


@pytest.fixture
def candidate(monkeypatch):
    standin.install(monkeypatch)
    return Candidate(load("rankmixer", Settings(shape=(3, 4, 16, 2))), Options())


def test_one_plan_is_proved_on_fresh_values_for_each_seed(candidate):
    first, fused = candidate.make(0)
    weight = first.module.w1.detach().clone()
    second, same = candidate.make(1)
    assert same is fused
    assert second.module is first.module
    assert not torch.equal(second.module.w1, weight)
    assert torch.equal(second.module.w1, candidate.subgraph.case(1).module.w1)
    assert not torch.equal(second.args[0], first.args[0])
    again, _ = candidate.make(0)
    assert torch.equal(again.module.w1, weight)


def test_measure_and_its_record(candidate, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS", "ATEN")
    monkeypatch.setenv("HOME_OF_NOBODY", "kept out")
    report = candidate.check(1)
    seen = []
    result = measure(
        candidate.ready(), "title", ("eager", "products"), samples=3, warmup=1, check=report,
        progress=lambda *s: seen.append(s), settings={"seed": 0},
    )  # fmt: skip
    assert list(result.samples) == ["eager", "megafuse", "bare products"]
    assert result.peaks["eager"].during > 0
    assert seen[-1] == ("timing", 3, 3)
    write_json(tmp_path / "new" / "raw.json", result.to_json())
    data = json.loads((tmp_path / "new" / "raw.json").read_text())
    assert all(len(c["time"]["raw"]) == 3 for c in data["candidates"].values())
    assert data["checked"]["passed"] is True
    assert data["environment"]["packages"]["torch"] == torch.__version__
    variables = data["environment"]["variables"]
    assert variables["TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS"] == "ATEN"
    assert "HOME_OF_NOBODY" not in variables
    assert data["settings"] == {"seed": 0, "samples": 3, "warmup": 1, "flush_bytes": 64 << 20}
    assert data["plan"]["regions"][0]["kernels"] == ["f1_norm"]
    out = console()
    with out.capture() as text:
        out.print(result)
    shown = text.get()
    assert max(map(len, shown.splitlines())) <= 100
    assert "…" not in shown
    assert "UNCHECKED" not in shown


def test_without_a_check_the_result_says_so(candidate):
    result = measure(
        candidate.ready(), "title", ("eager",), samples=2, warmup=0, check=None,
        progress=lambda *s: None,
    )  # fmt: skip
    out = console()
    with out.capture() as text:
        out.print(result)
    assert text.get().count("UNCHECKED") == 2
    assert result.to_json()["checked"] == "UNCHECKED"


def test_a_rival_that_cannot_run_is_listed(candidate, monkeypatch):
    def refuse(module, *args, **kwargs):
        raise RuntimeError("no compiler here\nmore")

    monkeypatch.setattr(torch, "compile", refuse)
    result = measure(
        candidate.ready(), "title", ("eager", "compile"), samples=2, warmup=0, check=None,
        progress=lambda *s: None,
    )  # fmt: skip
    assert result.unavailable == ("torch.compile: RuntimeError: no compiler here",)
    assert "torch.compile" not in result.samples


def test_bare_products_compute_the_products_of_the_graph(monkeypatch):
    calls = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b, out: calls.append((a, b, bmm(a, b, out=out))))
    bare_products(standin.plan().matmuls, CPU)()
    shapes = [(tuple(a.shape), tuple(b.shape), tuple(o.shape)) for a, b, o in calls]
    assert shapes == [((2, 8, 16), (2, 16, 4), (2, 8, 4)), ((2, 8, 4), (2, 4, 16), (2, 8, 16)),
                      ((2, 16, 8), (2, 8, 4), (2, 16, 4))]  # fmt: skip
    assert calls[0][0].is_contiguous() and not calls[2][0].is_contiguous()
    assert calls[1][1].transpose(1, 2).is_contiguous()
    assert not torch.equal(calls[0][0], torch.zeros_like(calls[0][0]))


def test_choice_of_rivals(candidate):
    assert default_rivals(CPU) == ("eager", "products")
    assert parse_rivals("products", CPU) == ("eager", "products")
    assert parse_rivals("compile, products", CPU) == ("eager", "compile", "products")
    with pytest.raises(RivalError, match="unknown rival 'tpu'"):
        parse_rivals("tpu", CPU)
    with pytest.raises(RivalError, match="needs --device cuda"):
        parse_rivals("graphed", CPU)
    with pytest.raises(RivalError, match="no matrix products"):
        build_rival("products", candidate.ready(), ())
