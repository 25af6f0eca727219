import json
import shutil
import subprocess
import sys

import pytest
import standin

SMALL = ("--shape", "3,4,16,2")


def wrong_epsilon(block):
    block.norm_x.eps = 1e-3


@pytest.fixture
def fused(monkeypatch):
    """Install the stand-in compiler; returns how to install a broken one."""
    standin.install(monkeypatch)
    return lambda change: standin.install(monkeypatch, change)


def test_help_does_not_import_torch():
    """The command's own modules; what the package imports before them is stubbed out."""
    code = (
        "import sys, types, importlib.util as u\n"
        "spec = u.find_spec('megafuse'); fake = types.ModuleType('megafuse')\n"
        "fake.__path__ = spec.submodule_search_locations; sys.modules['megafuse'] = fake\n"
        "from megafuse.cli import main\n"
        "try: main(['bench', '--help'])\n"
        "except SystemExit as e: sys.exit(7 if 'torch' in sys.modules else e.code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "without it nothing is written" in " ".join(done.stdout.split())


def test_demo_shows_plan_check_and_gain(megafuse, fused):
    result = megafuse("demo", *SMALL, "--seeds", "8", "--samples", "3")
    assert result.exit_code == 0, result.output
    for words in ("PLAN: F1", "PASS: 16 tensors x 8 seeds in bfloat16", "latency, median",
                  "throughput", "peak memory of the step", "bytes moved, by the plan"):  # fmt: skip
        assert words in result.output
    assert (
        result.output.index("PLAN") < result.output.index("PASS") < result.output.index("latency")
    )
    assert max(map(len, result.output.splitlines())) <= 100


@pytest.mark.parametrize("command", ["demo", "bench", "profile", "workload"])
def test_no_timing_for_a_candidate_that_fails_its_check(megafuse, fused, command):
    fused(wrong_epsilon)
    result = megafuse(command, *SMALL)
    assert result.exit_code == 1
    shown = result.output + result.stderr
    assert "FAIL" in shown and "No timing is shown" in shown
    for words in ("latency", "median", "samples/s", "Kernels of", "mode=fwd+bwd"):
        assert words not in shown


def test_check_status_and_record(megafuse, fused, tmp_path):
    path = tmp_path / "check.json"
    result = megafuse("check", "dense_ffn", *SMALL, "--seeds", "2", "--json", str(path))
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text())
    assert data["check"]["passed"] and data["settings"]["seeds"] == 2
    fused(wrong_epsilon)
    assert megafuse("check", *SMALL, "--seeds", "1").exit_code == 1


def test_bench_writes_raw_samples_where_asked(megafuse, fused, tmp_path):
    path = tmp_path / "raw.json"
    words = ("bench", *SMALL, "--samples", "4", "--warmup", "1", "--rivals", "products")
    result = megafuse(*words, "--json", str(path))
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text())
    assert {n: len(c["time"]["raw"]) for n, c in data["candidates"].items()} == {
        "eager": 4, "megafuse": 4, "bare products": 4,
    }  # fmt: skip
    assert data["settings"]["shape"] == [3, 4, 16, 2]


def test_unchecked_output_is_labelled(megafuse, fused):
    fused(wrong_epsilon)
    result = megafuse("bench", *SMALL, "--samples", "2", "--no-check")
    assert result.exit_code == 0
    assert "UNCHECKED" in result.output
    result = megafuse("workload", *SMALL, "--num-tests", "2", "--no-check")
    assert result.output.startswith("UNCHECKED megafuse rankmixer B=3 T=4 D=16")


def test_workload_prints_the_runners_lines(megafuse, fused):
    result = megafuse("workload", "dense_ffn", *SMALL, "--dtype", "fp32", "--num-tests", "3")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("megafuse dense_ffn B=3 T=4 D=16 k=2 H=32 T_local=4")
    assert "mode=fwd+bwd" in lines[0] and "dtype=float32" in lines[0]
    assert lines[1].startswith("rank=0 mode=fwd+bwd mean=") and lines[1].endswith("samples=2")
    assert lines[2].startswith("reference dense_ffn")


def test_profile_on_a_cpu_says_what_is_missing(megafuse, fused):
    result = megafuse("profile", *SMALL)
    assert result.exit_code == 0
    assert "Regions of one step" in result.output
    assert "need a GPU" in " ".join(result.output.split())


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_with_the_real_compiler(megafuse):
    """The contract with the core, end to end; its numbers are judged elsewhere."""
    result = megafuse("explain", *SMALL)
    assert result.exit_code == 0 and "backward" in result.output
    result = megafuse("bench", *SMALL, "--samples", "2", "--no-check")
    assert result.exit_code == 0 and "bare products" in result.output
    result = megafuse("profile", *SMALL, "--no-check")
    assert result.exit_code == 0 and "Regions of one step" in result.output


def test_explain_and_doctor(megafuse, fused):
    assert megafuse("explain", *SMALL).output == "PLAN: F1, F2, B1\n"
    result = megafuse("doctor")
    assert result.exit_code == 0
    assert "This machine can" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [(("check", "nonsense"), "megafuse: SubgraphError: unknown subgraph 'nonsense'"),
     (("check", "--shape", "2,3,16"), "megafuse: WorkloadError: --shape needs T to divide D"),
     (("bench", "--rivals", "tpu"), "megafuse: RivalError: unknown rival 'tpu'"),
     (("check", "--tf32"), "megafuse: SubgraphError: --tf32"),
     (("profile", "--ncu", "--device", "cpu"), "megafuse: ProfileError: --ncu reads a GPU"),
     (("workload", "f.py:g"), "megafuse: SubgraphError: f.py: no such file")],
)  # fmt: skip
def test_named_errors_are_one_line_and_status_two(megafuse, fused, words, message):
    result = megafuse(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("shape", ["a,b", "0,4,16", ""])
def test_a_malformed_shape_is_a_usage_error(megafuse, fused, shape):
    result = megafuse("check", "--shape", shape)
    assert result.exit_code == 2
    assert "--shape" in result.stderr


def test_traceback_on_request(megafuse, fused):
    with pytest.raises(Exception, match="unknown subgraph"):
        megafuse("check", "nonsense", "--traceback")
