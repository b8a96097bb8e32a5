# SPDX-License-Identifier: Apache-2.0
"""Programs that time or count something on the host."""
