# SPDX-License-Identifier: Apache-2.0
"""The bars of forests: requests over KV caches that begin with the same pages."""

from benchmarks.cell_bars import check, check_at_most

# Speed over the plain call and over FlashInfer's levels, the time where requests share nothing, and that of an update.
FOREST_OVER, FOREST_OVER_CASCADE = {"64 x 8704": 4}, {"64 x 8704": 1.3, "16 x 33792": 1.2}
FOREST_OF_NONE, FOREST_UPDATE_US = 1.03, 1000


def of_forest(row):
    us, name = row["us"], row["cell"]
    found = [check_at_most(f"{name}: update of a forest, microseconds", us["update"], FOREST_UPDATE_US)]
    if not row["shared"]:
        share = us["forest"] / us["ours"]
        return [*found, check_at_most(f"{name}: a forest of nothing shared over the plain call", share, FOREST_OF_NONE)]
    size = name.split(",")[0]
    over = {"the plain call": ("ours", FOREST_OVER), "FlashInfer's levels": ("cascade", FOREST_OVER_CASCADE)}
    for what, (other, bars) in over.items():
        if size in bars and other in us:
            found.append(check(f"{name}: a forest over {what}", us[other] / us["forest"], bars[size]))
    return found


def of_all(figures):
    """All bars of a receipt's figures."""
    return [found for row in figures["cells"] for found in of_forest(row)]
