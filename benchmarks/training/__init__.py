# SPDX-License-Identifier: Apache-2.0
"""A small Llama on packed text, trained with and without skipping tiles."""
