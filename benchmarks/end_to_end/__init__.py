# SPDX-License-Identifier: Apache-2.0
"""Training of models of real shape, one attention after another: the FlashMask paper's end-to-end results."""
