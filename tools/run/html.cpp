// SPDX-License-Identifier: Apache-2.0
#include "run/html.h"

#include <fmt/format.h>

#include "draw/svg_markup.h"

namespace flashmask::run {
namespace {

/// Colours of both schemes; d0 to d5 tell neighbouring documents apart.
constexpr std::string_view kStyle = R"(
:root { color-scheme: light dark; --page: #f5f7f9; --card: #fff; --ink: #1f2933; --faded: #5d6975; --line: #dde3e9;
  --masked: #2f6fb5; --dense: #b9c4cf;
  --good: #1c7c4a; --good-page: #e2f4ea; --bad: #b3261e; --bad-page: #fbe6e4; --pad: #e4e8ed; --pad-line: #c3ccd5;
  --d0: #2f6fb5; --d1: #1d8a80; --d2: #b8802a; --d3: #b4517a; --d4: #7059b0; --d5: #5b8a34; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14181c; --card: #1e242a; --ink: #e6ebf0; --faded: #9aa7b3; --line: #333c45; --masked: #5b9bdf;
  --dense: #56626e; --good: #6fd19b; --good-page: #17372a; --bad: #ff9d94; --bad-page: #43201d; --pad: #2a323a;
  --pad-line: #434e59; --d0: #5b9bdf; --d1: #43b3a8; --d2: #d9a54c; --d3: #d97ba2; --d4: #9c86dd; --d5: #84b75a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 0 0 4px; }
p { margin: 0 0 12px; max-width: 80ch; }
.faded { color: var(--faded); }
.verdict { display: inline-block; margin: 12px 0 0; padding: 4px 12px; border-radius: 14px; font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); }
.verdict.good { background: var(--good-page); } .verdict.bad { background: var(--bad-page); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 24px 0; }
.figure, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.figure { padding: 12px 16px; }
.figure b { display: block; font-size: 24px; line-height: 1.3; }
.figure span { color: var(--faded); font-size: 13px; }
section { padding: 20px 24px; margin: 0 0 20px; overflow-x: auto; }
section > p { color: var(--faded); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 12px; border-top: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--faded); font-size: 13px; border-top: 0; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th:last-child, td:last-child { padding-right: 0; }
table + table, div + table, svg + table { margin-top: 16px; }
.wrap td { white-space: normal; text-align: left; vertical-align: top; }
.chart { display: block; width: 100%; min-width: 600px; height: auto; }
.chart text { fill: var(--ink); font-size: 13px; } .chart .faded { fill: var(--faded); }
.key { display: inline-flex; flex-wrap: wrap; gap: 4px 20px; margin: 0 0 12px; color: var(--faded); font-size: 13px; }
.key i { display: inline-block; width: 14px; height: 14px; border-radius: 3px; margin-right: 6px;
  vertical-align: -2px; }
.masks { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 16px; }
.masks figure { margin: 0; } .masks figcaption { font-weight: 600; margin: 0 0 6px; }
.masks figure > svg { display: block; width: 100%; height: auto; border: 1px solid var(--line); border-radius: 8px; }
@media (prefers-color-scheme: dark) { .masks figure > svg { filter: brightness(0.86); } }
footer { color: var(--faded); font-size: 13px; }
@media (max-width: 560px) {
  main { padding: 20px 12px; } section { padding: 16px; } .masks { grid-template-columns: 1fr; }
}
@media print { section, .figure { break-inside: avoid; } }
)";

std::string row(std::string_view tag, const std::vector<std::string>& cells) {
  std::string text = "<tr>";
  for (const std::string& cell : cells) text += fmt::format("<{0}>{1}</{0}>", tag, cell);
  return text + "</tr>\n";
}

}  // namespace

std::string table(const std::vector<std::string>& header, const std::vector<std::vector<std::string>>& rows) {
  std::string text = "<table>\n";
  if (!header.empty()) text += row("th", header);
  for (const auto& cells : rows) text += row("td", cells);
  return text + "</table>\n";
}

std::string page(std::string_view title, std::string_view body) {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" "
      "content=\"width=device-width, "
      "initial-scale=1\">\n"
      "<title>{}</title>\n<style>{}</style>\n</head>\n<body>\n<main>\n{}</main>\n</body>\n</html>\n",
      escaped(title), kStyle, body);
}

}  // namespace flashmask::run
