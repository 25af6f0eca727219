"""calibrate: what is measured is kept, used and told; nothing else depends on it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megafuse
from megafuse import device, rates
from megafuse.device import CPU, H200, device_name, predicted_for, spec_for
from megafuse.rates import Rates
from megafuse.tools import calibrate
from megafuse.tools.explain import explain

HERE = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of this test's own for the rates."""
    monkeypatch.setenv("MEGAFUSE_CACHE", str(tmp_path))
    rates._load.cache_clear()
    yield tmp_path
    rates._load.cache_clear()


def some(**changes: Any) -> Rates:
    values: dict[str, Any] = {
        "device": device_name(HERE), "date": "2026-01-02", "bandwidth": 5e9, "l2_bandwidth": 5e10,
        "cache_bytes": 1 << 16, "launch_seconds": 1e-5, "matmul_rate": {"float32": 3e10},
    }  # fmt: skip
    return Rates(**{**values, **changes})


def explained() -> Any:
    x = torch.ones(64, 1024)
    return explain(megafuse.fuse(lambda x: x * 2.0 + 1.0, x), (x,))


def test_measuring_this_cpu(megafuse_command: Callable[..., Any], cache: Path) -> None:
    record = cache / "rates.json"
    result = megafuse_command("calibrate", "--device", "cpu", "--json", str(record))
    assert result.exit_code == 0 and "matrix product, float32" in result.output
    found = rates.load(device_name(HERE))
    assert found is not None and json.loads(record.read_text())["rates"] == found.to_json()
    assert 1e8 < found.bandwidth < 1e12 and found.bandwidth < 2 * found.l2_bandwidth
    assert 1e-7 < found.launch_seconds < 1e-2
    assert 1e8 < found.matmul_rate["float32"] < 1e14
    assert spec_for(HERE).bandwidth == found.bandwidth


def test_predictions_use_and_name_them() -> None:
    before = explained()
    assert before.spec is H200 and "H200, default rates" in str(before)
    rates.store(some())
    after = explained()
    assert after.spec.bandwidth == 5e9 and after.spec.arch == CPU.arch
    assert f"times predicted for {device_name(HERE)}, rates measured on 2026-01-02" in str(after)
    (region,) = after.summary.regions
    assert region.predicted_ms == pytest.approx(2 * 64 * 1024 * 4 / 5e9 * 1e3 + 1e-2)
    assert after.summary.regions[0].bytes_read == before.summary.regions[0].bytes_read


def test_small_tensors_are_moved_within_the_cache() -> None:
    rates.store(some(cache_bytes=1 << 20))
    spec = spec_for(HERE)
    assert spec.move_seconds(1 << 20) == (1 << 20) / 5e10
    assert spec.move_seconds(1 + (1 << 20)) == (1 + (1 << 20)) / 5e9
    assert H200.move_seconds(1000) == 1000 / H200.bandwidth


def test_the_same_file_gives_the_same_words_and_plans_do_not_change() -> None:
    def regions() -> list[tuple[str, ...]]:
        return [(r.name, r.kind, *r.kernels) for r in explained().summary.regions]

    without = regions()
    rates.store(some())
    assert str(explained()) == str(explained()) and regions() == without


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"version": 1}', '{"version": 99}',
     json.dumps({**some().to_json(), "bandwidth": 0}),
     json.dumps({**some().to_json(), "bandwidth": "fast"}),
     json.dumps({**some().to_json(), "device": "another"})],
)  # fmt: skip
def test_a_damaged_file_counts_as_none_with_one_warning(text: str) -> None:
    path = rates.path_for(device_name(HERE))
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.warns(UserWarning, match="not usable .*megafuse calibrate") as caught:
        assert predicted_for(HERE) is H200
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert spec_for(HERE) is CPU


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGAFUSE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(calibrate, "measure", lambda *_: some())
    with pytest.raises(megafuse.MegafuseError, match=r"cannot be kept in .*MEGAFUSE_CACHE"):
        calibrate.calibrate(HERE)


def test_rates_are_kept_by_device_name() -> None:
    rates.store(some(device="NVIDIA H200"))
    assert rates.path_for("NVIDIA H200").name == "NVIDIA-H200.json"
    assert rates.load("NVIDIA H200") is not None and rates.load(device.cpu_name()) is None
