# SPDX-License-Identifier: Apache-2.0
import sys

from benchmarks.training.train import main

sys.exit(main())
