"""Makes attention_cases.py importable by name: the folder's own name, kernels, belongs to a package of other people."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
