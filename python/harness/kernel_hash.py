# SPDX-License-Identifier: Apache-2.0
"""The hashes of a library's GPU kernels: scripts/kernel-hash.

kernel-hash LIBRARY: prints {"toolkit": nvcc's full build string, "kernels": {id: hash}}.
kernel-hash LIBRARY --same-code-as OLD: says which of them are other code than OLD's, whatever its kernels are called.

A kernel's hash changes when its machine code does, or its threads, shared memory or tile; names, comments, places of
files and other kernels leave it alone. The receipts in benchmarks/results carry the hashes of the kernels they
measured. Needs no GPU.
"""

import argparse
import json
import sys
from pathlib import Path

from harness import cubin, kernels


def main():
    parser = argparse.ArgumentParser(
        prog="kernel-hash", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "library", nargs="?", type=Path, default=kernels.default_library(), help="default: what was built here last"
    )
    parser.add_argument(
        "--same-code-as",
        type=Path,
        metavar="OLD",
        help="a library to compare with; the exit status is 1 where code differs",
    )
    arguments = parser.parse_args()
    if arguments.library is None:
        parser.error("no library is named, and none was built here")
    try:
        if arguments.same_code_as:
            sys.exit(compare(arguments.library, arguments.same_code_as))
        print(json.dumps(kernels.hashes(arguments.library.resolve()), indent=1))
    except (OSError, cubin.CubinError) as error:
        sys.exit(f"kernel-hash: {error}")


def compare(library, old):
    """1 if the library holds code that the other one does not, which is printed; else 0."""
    now, before = cubin.kernel_digests(library), set(cubin.kernel_digests(old).values())
    other = [symbol for (_, symbol), digest in now.items() if digest not in before]
    print(
        f"{len(now) - len(other)} of {len(now)} kernels are the same code as in {old} "
        f"({cubin.toolkit(library)}; {cubin.toolkit(old)})"
    )
    print("".join(f"other code: {symbol}\n" for symbol in other), end="")
    return int(bool(other))


if __name__ == "__main__":
    main()
