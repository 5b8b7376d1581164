"""Check that a loss does not depend on how a step is split, on real backends, against an unsplit float64 oracle."""

from miles.testing.backends import Backend, FSDPBackend, MegatronBackend
from miles.testing.check import check_invariance, find_failures
from miles.testing.oracle import expected_outcome
from miles.testing.step import CustomCorrection, CustomLoss, CustomReducer, Outcome, Row, Scores, Split, Step
from miles.testing.worlds import WorldError, run_world

__all__ = [
    "Backend",
    "CustomCorrection",
    "CustomLoss",
    "CustomReducer",
    "FSDPBackend",
    "MegatronBackend",
    "Outcome",
    "Row",
    "Scores",
    "Split",
    "Step",
    "WorldError",
    "check_invariance",
    "expected_outcome",
    "find_failures",
    "run_world",
]
