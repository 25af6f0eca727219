import shutil

import pytest

from megafuse.tools import doctor
from megafuse.tools.doctor import abilities, examine


def test_every_missing_thing_has_a_way_out():
    findings = examine()
    assert {"Python", "PyTorch", "C++ compiler", "GPU", "NVRTC"} <= {f.name for f in findings}
    for finding in findings:
        assert finding.found and finding.needed_for
        assert finding.way_out or finding.ok


def test_without_a_compiler_the_reference_executor_is_left(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    able = dict(abilities(examine()))
    assert not able["fuse, check and time on the CPU"]
    assert able["the reference executor (no compiler)"]


@pytest.mark.parametrize(
    ("built", "bindings", "words"),
    [(None, None, "megafuse[cuda12]"), ("13.0", None, "megafuse[cuda13]"),
     ("13.0", "12.8.0", "megafuse[cuda13]")],
)  # fmt: skip
def test_cuda_bindings_must_be_of_the_same_major(monkeypatch, built, bindings, words):
    monkeypatch.setattr(doctor, "version", lambda name: bindings)
    finding = doctor._nvrtc(built)
    assert not finding.ok
    assert words in finding.way_out
