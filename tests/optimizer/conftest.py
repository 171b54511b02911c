"""Makes the builders of run folders and traces importable here too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "reports"))
