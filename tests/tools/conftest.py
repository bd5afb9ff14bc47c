"""The scripts of tools/ import each other as scripts do: by their folder."""

import sys
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"
sys.path += [str(TOOLS), str(TOOLS / "parser")]
