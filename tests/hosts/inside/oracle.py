"""The exact-fractions oracle of the fast tests, loaded from its file: here the host owns the name `tests`."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("_oracle", Path(__file__).parents[2] / "fast" / "oracle.py")
_module = importlib.util.module_from_spec(_spec)
sys.modules["_oracle"] = _module
_spec.loader.exec_module(_module)

MODES, Row, groups, rollouts = _module.MODES, _module.Row, _module.groups, _module.rollouts
mean_over, num_tokens, value, weights = _module.mean_over, _module.num_tokens, _module.value, _module.weights
