# SPDX-License-Identifier: Apache-2.0
"""The frontend for PyTorch, whose public names are those of flashmask itself."""
