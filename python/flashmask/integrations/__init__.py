# SPDX-License-Identifier: Apache-2.0
"""What libraries of models need to use these masks: transformers.py registers them, collators.py makes batches."""
