"""Make the workload package importable and its folder known to the tests."""

import sys
from pathlib import Path

import pytest

WORKLOAD = Path(__file__).resolve().parents[2] / "research_topic_1"
sys.path.insert(0, str(WORKLOAD))


@pytest.fixture
def workload() -> Path:
    """The folder of the workload package."""
    return WORKLOAD
