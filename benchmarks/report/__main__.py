# SPDX-License-Identifier: Apache-2.0
"""Writes the documents' figures, SVG files and one self-contained HTML page, from the receipts of GPU runs.

    python -m benchmarks.report --docs
    python -m benchmarks.report [--library build/release/src/libflashmask.so] [--html out/gpu.html] [--svg out]

--docs writes docs/performance.md, docs/performance/, docs/end-to-end.md, the figures of README and other pages, and
docs/img/gpu-*.svg from all receipts (documents.py). The HTML page (html_page.py) has only what the library's kernels
measured.
"""

import argparse
import sys
from pathlib import Path

from benchmarks import receipts
from benchmarks.report import documents, performance_pages
from benchmarks.report.html_page import page, shown_of
from benchmarks.report.pictures import document_drawings, drawings


def parse_arguments(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=receipts.RESULTS, help="folder of receipts")
    parser.add_argument(
        "--library", type=Path, help="whose kernels count; default: $FLASHMASK_LIBRARY, or one that was built here"
    )
    parser.add_argument("--html", type=Path, default=Path("out/gpu.html"))
    parser.add_argument("--svg", type=Path, help="also write each chart to this folder")
    parser.add_argument("--docs", action="store_true", help="write the documents' figures, and no page")
    return parser.parse_args(words)


def write_svg(folder, drawn):
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in drawn.items():
        (folder / f"gpu-{name}.svg").write_text(svg)
        print(folder / f"gpu-{name}.svg")


def write_page(arguments):
    library = receipts.library_of(arguments.library)
    if library is None:
        raise ValueError("there is no library to judge the receipts by; build one or name it: --library")
    cases, figures, hidden = shown_of(receipts.load_folder(arguments.results), library)
    arguments.html.parent.mkdir(parents=True, exist_ok=True)
    arguments.html.write_text(page(cases, figures, hidden, library))
    print(f"{arguments.html}: {len(cases)} cells")
    if arguments.svg:
        write_svg(arguments.svg, drawings(cases, figures))
    for why in hidden:
        print(f"not shown: {why}", file=sys.stderr)


def warn_about_stale(found, path):
    """The documents show every receipt. A library with GPU kernels, if there is one, says which are of others."""
    try:
        library = receipts.library_of(path)
    except ValueError as error:
        print(f"stale cells are not known: {error}", file=sys.stderr)
        return
    judged = receipts.judge(found, library) if library else []
    for line in sorted({f"{file} is {state}" for file, _, state in judged if state.startswith("stale")}):
        print(f"in the documents, though a cell of {line}", file=sys.stderr)


def write_documents(found):
    pages = documents.pages(found)
    folder = documents.ROOT / performance_pages.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if str(path.relative_to(documents.ROOT)) not in pages:
            path.unlink()
    for name, text in pages.items():
        (documents.ROOT / name).write_text(text, encoding="utf-8")
        print(name)
    write_svg(documents.ROOT / documents.PICTURES, document_drawings(found))


def main(words=None):
    arguments = parse_arguments(words)
    try:
        if arguments.docs:
            found = receipts.load_folder(arguments.results)
            write_documents(found)
            warn_about_stale(found, arguments.library)
        else:
            write_page(arguments)
    except ValueError as error:
        sys.exit(f"report: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
