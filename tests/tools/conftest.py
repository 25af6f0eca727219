import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from click.testing import CliRunner

from megafuse.cli import main


@pytest.fixture
def megafuse_command():
    """Run the command in this process: megafuse_command("check", ...) -> click Result."""
    return lambda *words: CliRunner().invoke(main, list(words), catch_exceptions=False)
