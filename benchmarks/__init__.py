# SPDX-License-Identifier: Apache-2.0
"""Measurements, their receipts and their pages.

Programs run from the repository root with python/ in PYTHONPATH, for example `python -m benchmarks.report`.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks" / "data"
