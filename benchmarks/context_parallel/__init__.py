# SPDX-License-Identifier: Apache-2.0
"""Attention over several GPUs: how placements balance, and how long each way takes."""
