# SPDX-License-Identifier: Apache-2.0
"""Runs of tests and measurements on a GPU, which scripts/gpu-check starts."""
