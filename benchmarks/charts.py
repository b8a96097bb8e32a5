# SPDX-License-Identifier: Apache-2.0
"""Charts as self-contained SVG, in colours that hold on a light and on a dark page. Text only, no dependency."""

import math
from html import escape

# Colours of ours and of the contenders.
OURS, FLEX, CUDNN, V3, FA3, DENSE = "#2f6fde", "#d9822b", "#3f9c6b", "#8a63c9", "#c2527a", "#9aa5b1"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
STYLE = """
.card{fill:#ffffff}.ink{fill:#1f2933}.soft{fill:#66727f}.grid{stroke:#e3e8ed}.axis{stroke:#9aa5b1}.onbar{fill:#1f2933}
@media (prefers-color-scheme:dark){.card{fill:#161b22}.ink{fill:#e6edf3}.soft{fill:#9aa7b4}.grid{stroke:#2b333c}
.axis{stroke:#55616d}.onbar{fill:#e6edf3}}
""".strip().replace("\n", "")


def number(value):
    return f"{value:.2f}".rstrip("0").rstrip(".")


class Svg:
    def __init__(self, width, height, title, description=""):
        self.width, self.height = width, height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'role="img" font-family="{FONT}">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(description)}</desc>",
            f"<style>{STYLE}</style>",
            '<rect class="card" width="100%" height="100%" rx="8"/>',
        ]

    def text(self, x, y, words, size=12, kind="soft", anchor="start", weight=None, rotate=None):
        extra = f' font-weight="{weight}"' if weight else ""
        if rotate is not None:
            extra += f' transform="rotate({rotate} {number(x)} {number(y)})"'
        self.parts.append(
            f'<text class="{kind}" x="{number(x)}" y="{number(y)}" font-size="{size}" '
            f'text-anchor="{anchor}"{extra}>{escape(str(words))}</text>'
        )

    def line(self, x1, y1, x2, y2, kind="grid", extra=""):
        self.parts.append(
            f'<line class="{kind}" x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}" {extra}/>'
        )

    def rect(self, x, y, width, height, fill, tip="", extra=""):
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        self.parts.append(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" '
            f'fill="{fill}" rx="1.5" {extra}>{inside}</rect>'
        )

    def dot(self, x, y, fill, tip="", radius=3):
        self.parts.append(
            f'<circle cx="{number(x)}" cy="{number(y)}" r="{radius}" fill="{fill}" fill-opacity="0.65">'
            f"<title>{escape(tip)}</title></circle>"
        )

    def path(self, points, stroke, extra=""):
        steps = " ".join(f"{'M' if n == 0 else 'L'}{number(x)} {number(y)}" for n, (x, y) in enumerate(points))
        self.parts.append(f'<path d="{steps}" fill="none" stroke="{stroke}" stroke-width="2" {extra}/>')

    def legend(self, x, y, entries):
        """entries: (label, colour, 'box' | 'line' | 'dash' | 'hollow')"""
        for label, colour, kind in entries:
            if kind in ("box", "hollow"):
                self.rect(x, y - 9, 11, 11, colour if kind == "box" else "none", extra=f'stroke="{colour}"')
            else:
                dash = 'stroke-dasharray="5 4" ' if kind == "dash" else ""
                self.parts.append(
                    f'<line x1="{number(x - 3)}" y1="{number(y - 4)}" x2="{number(x + 13)}" y2="{number(y - 4)}" '
                    f'stroke="{colour}" stroke-width="2" {dash}/>'
                )
            self.text(x + 17, y, label, 12, "ink")
            x += legend_width(label)

    def __str__(self):
        return "\n".join([*self.parts, "</svg>\n"])


def legend_width(label):
    """Approximate width of a legend's entry, in pixels."""
    return 34 + 6.6 * len(label)


def nice_step(largest, steps=5):
    """A step of 1, 2 or 5 times a power of ten that gives about `steps` lines."""
    raw = largest / steps
    power = 10 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)


def ticks(largest, steps=5):
    step = nice_step(largest, steps)
    return [n * step for n in range(math.ceil(largest / step - 1e-9) + 1)]


def bar_chart(title, subtitle, groups, series, unit, note=""):
    """Bars in groups [(label, {series key: value or None})] of series [(key, label, colour, 'box' | 'hollow')].

    Values stand on the bars of the first series.
    """
    bar, gap, left, top, plot = 14, 18, 62, 104, 250
    group_width = bar * len(series) + gap
    legend = sum(legend_width(label) for _, label, *_ in series)
    width, height = max(720, left + max(group_width * len(groups) + 24, legend)), top + plot + 150
    svg = Svg(width, height, title, subtitle)
    svg.text(24, 34, title, 17, "ink", weight=600)
    svg.text(24, 54, subtitle, 12)
    svg.legend(left, 80, [(label, colour, kind) for _, label, colour, kind in series])
    largest = max(v for _, values in groups for v in values.values() if v is not None)
    marks = ticks(1.06 * largest)  # room for the numbers on the bars
    scale = plot / marks[-1]
    for mark in marks:
        y = top + plot - mark * scale
        svg.line(left, y, width - 20, y, "grid" if mark else "axis")
        svg.text(left - 8, y + 4, f"{mark:g}", 11, anchor="end")
    svg.text(18, top + plot / 2, unit, 12, anchor="middle", rotate=-90)
    for n, (label, values) in enumerate(groups):
        draw_group(svg, left + gap / 2 + n * group_width, top + plot, bar, scale, label, values, series, unit)
    svg.text(24, height - 16, note, 11)
    return str(svg)


def draw_group(svg, x, base, bar, scale, label, values, series, unit):
    present = [s for s in series if values.get(s[0]) is not None]
    x += bar * (len(series) - len(present)) / 2
    for n, (key, name, colour, kind) in enumerate(present):
        value = values[key]
        height, at = value * scale, x + n * bar
        fill = colour if kind == "box" else "none"
        svg.rect(
            at + 0.75,
            base - height,
            bar - 1.5,
            height,
            fill,
            f"{label}, {name}: {value:.0f} {unit}",
            f'stroke="{colour}"',
        )
        if n == 0:
            svg.text(at + bar / 2 + 4, base - height - 5, f"{value:.0f}", 10, "onbar", rotate=-45)
    middle = x + bar * len(present) / 2
    svg.text(middle + 4, base + 16, label.replace("_", " "), 11, "ink", anchor="end", rotate=-38)


def scatter_chart(title, subtitle, points, series, x_label, y_label, lines=(), note=""):
    """points: [(series key, x in [0, 1], y, tip)], series: [(key, label, colour)], lines: [(colour, two (x, y))]."""
    width, height, left, top, plot_w, plot_h = 720, 470, 70, 96, 610, 290
    svg = Svg(width, height, title, subtitle)
    svg.text(24, 34, title, 17, "ink", weight=600)
    svg.text(24, 54, subtitle, 12)
    svg.legend(left, 80, [(label, colour, "box") for _, label, colour in series])
    marks = ticks(max(p[2] for p in points))

    def place(x, y):
        return left + x * plot_w, top + plot_h - y / marks[-1] * plot_h

    for mark in marks:
        svg.line(left, place(0, mark)[1], left + plot_w, place(0, mark)[1], "grid" if mark else "axis")
        svg.text(left - 8, place(0, mark)[1] + 4, f"{mark:g}", 11, anchor="end")
    for n in range(0, 11, 2):
        svg.text(place(n / 10, 0)[0], top + plot_h + 18, f"{n / 10:g}", 11, anchor="middle")
    svg.text(left + plot_w / 2, top + plot_h + 40, x_label, 12, anchor="middle")
    svg.text(20, top + plot_h / 2, y_label, 12, anchor="middle", rotate=-90)
    colours = {key: colour for key, _, colour in series}
    for colour, begin, end in lines:
        svg.path([place(*begin), place(*end)], colour, 'stroke-dasharray="5 4" stroke-opacity="0.8"')
    for key, x, y, tip in points:
        svg.dot(*place(x, y), colours[key], tip)
    svg.text(24, height - 16, note, 11)
    return str(svg)


def log_chart(title, subtitle, xs, series, x_label, y_label, x_text, y_text, note=""):
    """Lines over a doubling x on a logarithmic y. series: [(label, colour, 'line' | 'dash', [y, ...])]."""
    width, height, left, top, plot_w, plot_h = 720, 470, 84, 96, 596, 290
    svg = Svg(width, height, title, subtitle)
    svg.text(24, 34, title, 17, "ink", weight=600)
    svg.text(24, 54, subtitle, 12)
    svg.legend(left, 80, [(label, colour, kind) for label, colour, kind, _ in series])
    every = [y for *_, ys in series for y in ys]
    low, high = math.floor(math.log2(min(every)) / 4) * 4, math.ceil(math.log2(max(every)) / 4) * 4

    def place(x, y):
        return (
            left + math.log2(x / xs[0]) / math.log2(xs[-1] / xs[0]) * plot_w,
            top + plot_h - (math.log2(y) - low) / (high - low) * plot_h,
        )

    for power in range(low, high + 1, 4):
        y = place(xs[0], 2.0**power)[1]
        svg.line(left, y, left + plot_w, y, "grid" if power > low else "axis")
        svg.text(left - 8, y + 4, y_text(2.0**power), 11, anchor="end")
    for x in xs:
        svg.text(place(x, every[0])[0], top + plot_h + 18, x_text(x), 11, anchor="middle")
    svg.text(left + plot_w / 2, top + plot_h + 40, x_label, 12, anchor="middle")
    svg.text(18, top + plot_h / 2, y_label, 12, anchor="middle", rotate=-90)
    for _, colour, kind, ys in series:
        svg.path([place(x, y) for x, y in zip(xs, ys)], colour, 'stroke-dasharray="6 4"' if kind == "dash" else "")
    svg.text(24, height - 16, note, 11)
    return str(svg)


def line_panels(title, subtitle, panels, series, x_label, y_label, note=""):
    """Lines over the steps 1, 2, ..., two panels in a row, one y axis for all.

    panels: [(title, {series key: [y, ...]})]; series: [(key, label, colour, CSS of the line)], in the order of drawing.
    """
    left, top, panel_w, panel_h, right, below = 56, 128, 340, 200, 28, 72
    rows = -(-len(panels) // 2)
    svg = Svg(2 * (left + panel_w) + right, top + rows * (panel_h + below), title, subtitle)
    svg.text(24, 34, title, 17, "ink", weight=600)
    svg.text(24, 54, subtitle, 12)
    svg.legend(left, 82, [(label, colour, "dash" if "dash" in style else "line") for _, label, colour, style in series])
    marks = ticks(max(y for _, runs in panels for ys in runs.values() for y in ys))
    for n, (name, runs) in enumerate(panels):
        x, y = left + n % 2 * (panel_w + left), top + n // 2 * (panel_h + below)
        draw_panel(svg, x, y, panel_w, panel_h, name, runs, series, marks, x_label, y_label)
    svg.text(24, svg.height - 14, note, 11)
    return str(svg)


def draw_panel(svg, left, top, width, height, name, runs, series, marks, x_label, y_label):
    steps = max(len(ys) for ys in runs.values())

    def place(step, y):
        return left + (step - 1) / max(steps - 1, 1) * width, top + height - y / marks[-1] * height

    svg.text(left, top - 8, name, 12, "ink", weight=600)
    for mark in marks:
        y = place(1, mark)[1]
        svg.line(left, y, left + width, y, "grid" if mark else "axis")
        svg.text(left - 8, y + 4, f"{mark:g}", 11, anchor="end")
    for step in sorted({1, (steps + 1) // 2, steps}):
        svg.text(place(step, 0)[0], top + height + 16, step, 11, anchor="middle")
    svg.text(left + width / 2, top + height + 32, x_label, 12, anchor="middle")
    svg.text(left - 38, top + height / 2, y_label, 12, anchor="middle", rotate=-90)
    for key, _, colour, style in series:
        if key in runs:
            svg.path([place(n, y) for n, y in enumerate(runs[key], 1)], colour, f'style="{style}"')
