# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks and the tests on a GPU share, and the installed package does not have: calls and an oracle."""
