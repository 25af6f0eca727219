import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from megafuse.cli import main


@pytest.fixture
def megafuse():
    """Run the command in this process: megafuse("check", "rankmixer", ...) -> click Result."""
    return lambda *words: CliRunner().invoke(main, list(words), catch_exceptions=False)
