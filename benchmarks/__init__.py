# SPDX-License-Identifier: Apache-2.0
"""Measurements, their receipts and their pages. Run from the repository root, `python -m benchmarks.report` for one,
with python/ in PYTHONPATH."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks" / "data"
