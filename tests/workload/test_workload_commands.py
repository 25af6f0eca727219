"""The brief's commands: what they accept, refuse, print, and say without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rank_mixer_src import launch
from rank_mixer_src.cli import parse_args
from rank_mixer_src.environment import missing_for_cuda
from rank_mixer_src.runner import BenchConfig

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
SCRIPTS = ("run_minimal_local.sh", "run_grouped_local.sh", "run_prod_local.sh")


def run(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, **NO_GPU, **env}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        parse_args(argv)
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--ep-group-size", "2"], "unrecognized"),
        (["--backward"], "unrecognized"),
        (["--check-correctness"], "unrecognized"),
        (["--sleep-ms", "3"], "unrecognized"),
        (["--seed", "3"], "unrecognized"),
        (["--batch", "4"], "unrecognized"),
        (["--ffn-type", "sparse_moe", "--moe-experts", "2"], "sparse_moe is not implemented"),
        (["--moe-experts", "4"], "sparse_moe"),
        (["--ffn-type", "other"], "invalid choice"),
        (["--gemm-backend", "other"], "invalid choice"),
        (["--dtype", "float64"], "invalid choice"),
        (["--k", "4"], "invalid choice"),
        (["--tokens", "7"], "divide"),
        (["--batch-size", "0"], "at least 1"),
        (["--warmup", "-1"], "at least 0"),
        (["--num-tests", "0"], "at least 1"),
    ],
)
def test_parser_refuses_in_one_line(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(argv, capsys)


def test_documented_options_are_accepted() -> None:
    shape = "--batch-size 1024 --tokens 64 --dim 1280 --k 2 --ffn-type dense_v2"
    counts = "--gemm-backend grouped --warmup 1 --num-tests 1"
    explicit = parse_args(f"{shape} {counts}".split())
    assert explicit == BenchConfig(1024, 64, 1280, 2, gemm_backend="grouped", warmup=1, num_tests=1)
    tf32 = ["--dtype", "float32", "--tf32", "--gemm-backend", "bmm"]
    assert parse_args(tf32) == BenchConfig(dtype="float32", tf32=True)
    assert parse_args([]) == BenchConfig()
    assert parse_args(["--list-backends"]) is None


def test_the_printed_configuration_has_the_documented_fields() -> None:
    line = str(BenchConfig())
    assert "B=1024 T=64 D=1280 k=2 H=2560 T_local=64 " in line
    assert "A2A_bytes_per_rank=0 mode=fwd+bwd " in line


@pytest.mark.parametrize("nproc", ["0", "x", "-1", "1.5"])
def test_nproc_must_be_a_positive_number(
    nproc: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NPROC", nproc)
    assert launch.main([]) == 1
    assert "NPROC must be" in capsys.readouterr().err


def pretend_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)


def test_nproc_above_the_gpu_count_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_gpus(2, monkeypatch)
    monkeypatch.delenv("NPROC", raising=False)
    assert launch.main([]) == 1
    error = capsys.readouterr().err
    assert "NPROC=8 needs 8 GPUs, but PyTorch sees 2" in error
    assert error.count("\n") == 1
    assert missing_for_cuda(2) is None


def test_launch_hands_over_to_torchrun(workload: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(2, monkeypatch)
    monkeypatch.setenv("NPROC", "2")
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: started.append(command))
    launch.main(["--dtype", "float16"])
    entry = str(workload / "rank_mixer_src" / "bench_rank_mixer.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    assert started == [[*torchrun, "--nproc_per_node=2", entry, "--dtype", "float16"]]


def test_scripts_are_valid_bash(workload: Path) -> None:
    for script in SCRIPTS:
        assert run(workload, "bash", "-n", f"scripts/{script}").returncode == 0


@pytest.mark.parametrize("folder", [".", "scripts"])
def test_list_backends_needs_no_gpu(workload: Path, folder: str) -> None:
    script = workload / "scripts" / "run_prod_local.sh"
    result = run(workload / folder, "bash", str(script), "--list-backends", NPROC="1")
    assert result.returncode == 0
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["bmm", "grouped"]


def test_the_entry_point_runs_as_a_script(workload: Path) -> None:
    entry = "rank_mixer_src/bench_rank_mixer.py"
    assert run(workload, sys.executable, entry, "--list-backends").returncode == 0
    assert run(workload, sys.executable, entry, "--backward").returncode == 2


def test_command_line_overrides_the_sample_counts_of_the_environment(workload: Path) -> None:
    result = run(workload, "bash", "scripts/run_prod_local.sh", "--warmup", "-2", WARMUP="3")
    assert (result.returncode, "got -2" in result.stderr) == (2, True)
    result = run(workload, "bash", "scripts/run_minimal_local.sh", NUM_TESTS="0")
    assert (result.returncode, "got 0" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    "command",
    [
        ["bash", "scripts/run_minimal_local.sh"],
        ["bash", "scripts/run_grouped_local.sh"],
        [sys.executable, "rank_mixer_src/bench_rank_mixer.py"],
        [sys.executable, "public_check.py"],
        [sys.executable, "preflight.py", "--target", "cuda"],
    ],
)
def test_cuda_commands_say_what_is_missing(workload: Path, command: list[str]) -> None:
    result = run(workload, *command, NPROC="1")
    assert result.returncode == 1
    assert "CUDA" in result.stderr
    assert result.stderr.count("\n") == 1


def test_preflight_cpu_passes_and_only_warns_about_versions(workload: Path) -> None:
    result = run(workload, sys.executable, "preflight.py", "--target", "cpu")
    assert result.returncode == 0, result.stderr
    for dtype in ("float32", "bfloat16"):
        assert f"PASS full block fwd+bwd (2,4,16,2) cpu {dtype}" in result.stdout
    pinned = torch.__version__ == "2.6.0+cpu"
    assert ("WARN torch is" in result.stdout) != pinned
