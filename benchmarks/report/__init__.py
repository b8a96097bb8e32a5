# SPDX-License-Identifier: Apache-2.0
"""From receipts to pages: documents, charts and one HTML page."""
