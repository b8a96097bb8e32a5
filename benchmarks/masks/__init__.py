# SPDX-License-Identifier: Apache-2.0
"""Masks that are measured, their rules for FlexAttention, and counts of their visible tiles."""
