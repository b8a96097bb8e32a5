// SPDX-License-Identifier: Apache-2.0
// Pages of `flashmask show --html` for the tests, what is in them, and a rule of their own for what a mask shows.
import {execFileSync} from "node:child_process";
import {mkdtempSync, readFileSync, rmSync} from "node:fs";
import {tmpdir} from "node:os";
import {join} from "node:path";
import process from "node:process";

export const program = process.argv[2];
export const folder = mkdtempSync(join(tmpdir(), "flashmask-pages-"));
process.on("exit", () => rmSync(folder, {recursive: true, force: true}));

export function familyNames() {
  return JSON.parse(execFileSync(program, ["show", "--list", "--json"])).families.map(({name}) => name);
}

/// The page that `flashmask show ARGUMENTS --html` writes.
export function pageOf(words) {
  const file = join(folder, "page.html");
  execFileSync(program, ["show", ...words, "--html", file]);
  return readFileSync(file, "utf8");
}

/// A script of the page, by its id.
export function scriptOf(page, id) {
  return new RegExp(`<script id="${id}"[^>]*>([^]*?)</script>`).exec(page)[1];
}

export function shownOf(page) {
  return JSON.parse(scriptOf(page, "shown"));
}

/// Whether row i sees key j of a mask in JSON: the contract of docs/mask.md, element by element.
export function sees(json, i, j) {
  const {band, q_offset: offset, seqlen_q: rows} = json, distance = j - (i + offset);
  const within = (begin, end) => (begin || end) && i >= (begin ? begin[j] : 0) && i < (end ? end[j] : rows);
  if ((band.lo !== null && distance < band.lo) || (band.hi !== null && distance > band.hi)) return false;
  if (within(json.lts, json.lte) || within(json.uts, json.ute)) return false;
  for (let n = json.column_ptr?.[j]; n < json.column_ptr?.[j + 1]; ++n)
    if (i >= json.intervals[2 * n] && i < json.intervals[2 * n + 1]) return false;
  return true;
}
