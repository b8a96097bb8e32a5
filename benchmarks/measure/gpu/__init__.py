# SPDX-License-Identifier: Apache-2.0
"""Programs that time something on a GPU; bench.py runs one by name."""
