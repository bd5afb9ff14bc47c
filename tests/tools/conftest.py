"""The scripts of tools/parser import each other as scripts do: by their folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tools" / "parser"))
