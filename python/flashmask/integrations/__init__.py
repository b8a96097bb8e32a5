# SPDX-License-Identifier: Apache-2.0
"""Integrations with libraries of models: transformers.py registers the masks, collators.py makes batches."""
