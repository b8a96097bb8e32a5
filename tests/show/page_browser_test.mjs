// SPDX-License-Identifier: Apache-2.0
// The page of every family in a browser: page_browser_test.mjs PROGRAM CHROMIUM
//
// One document holds all pages in frames, works their controls, and leaves what it saw in its text, which the browser
// prints.
import assert from "node:assert/strict";
import {execFileSync} from "node:child_process";
import {writeFileSync} from "node:fs";
import {join} from "node:path";
import {test} from "node:test";
import process from "node:process";

import {familyNames, folder, pageOf, shownOf} from "./pages.mjs";

const chromium = process.argv[3];

/// Before all else in a page: whatever goes wrong is remembered.
const listener = `<script>
  window.problems = [];
  addEventListener("error", (event) => problems.push(event.message));
  addEventListener("securitypolicyviolation",
    (event) => problems.push(event.violatedDirective + " " + event.blockedURI));
  for (const kind of ["error", "warn"]) console[kind] = (...words) => problems.push(words.join(" "));
</script>`;
/// After all else: the page's own names, for the document around it.
const probe = `<script>window.probe = () => ({visible: state.tiles.visible,
  classes: [...state.tiles.classes].join(""), order: state.order});</script>`;

/// Runs in the browser: works one page and says what it saw.
function work(frame) {
  const page = frame.contentWindow, byId = (id) => page.document.getElementById(id);
  const input = (control, value) => {
    control.value = value;
    control.dispatchEvent(new page.Event("input", {bubbles: true}));
  };
  const look = () => ({...page.probe(), error: byId("error").hidden ? "" : byId("error").textContent,
    pictures: ["mask", "order", "load"].map((id) => byId(id).toDataURL()), command: byId("command").textContent,
    title: page.document.title});
  const seen = {problems: page.problems, check: byId("check").textContent, before: look()};
  input(byId("tile"), "32x16");
  seen.otherTile = look();
  input(byId("tile"), "0");
  seen.wrongTile = look();
  input(byId("tile"), "16");
  const place = byId("mask").getBoundingClientRect();
  byId("mask").dispatchEvent(new page.MouseEvent("mousemove", {clientX: place.x + 200, clientY: place.y + 200}));
  seen.pointed = byId("pointed").textContent;
  return seen;
}

function documentOf(pages) {
  const frames = pages.map(({name, page}) => {
    const text = page.replace("<head>", `<head>${listener}`).replace("</body>", `${probe}</body>`);
    const quoted = text.replaceAll("&", "&amp;").replaceAll('"', "&quot;");
    return `<iframe id="${name}" width="1100" height="900" srcdoc="${quoted}"></iframe>`;
  });
  const script = `${work}
    addEventListener("load", () => {
      const seen = {};
      for (const name of ${JSON.stringify(pages.map(({name}) => name))}) {
        try { seen[name] = work(document.getElementById(name)); }
        catch (error) { seen[name] = {failed: String(error.stack)}; }
      }
      document.body.textContent = "SEEN" + btoa(JSON.stringify(seen).replace(/[^ -~]/g, "?")) + "SEEN";
    });`;
  return `<!DOCTYPE html><meta charset="utf-8"><body>${frames.join("\n")}<script>${script}</script></body>`;
}

function browse(pages) {
  const file = join(folder, "all.html");
  writeFileSync(file, documentOf(pages));
  const options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    `--user-data-dir=${join(folder, "profile")}`, "--virtual-time-budget=60000", "--dump-dom", `file://${file}`];
  const dom = execFileSync(chromium, options,
    {encoding: "utf8", maxBuffer: 1 << 28, stdio: ["ignore", "pipe", "ignore"], timeout: 240_000});
  const text = /SEEN([A-Za-z0-9+/=]+)SEEN/.exec(dom);
  assert.ok(text, `the browser printed no result:\n${dom.slice(0, 2000)}`);
  return JSON.parse(Buffer.from(text[1], "base64").toString());
}

const pages = familyNames().map((name) =>
  ({name, page: pageOf([name, "--seqlen", "300", "--seed", "1", "--tile", "16"])}));

const seen = browse(pages);

function same(look, shown, what) {
  assert.equal(look.error, "", what);
  assert.equal(look.visible, shown.library.visible, what);
  assert.equal(look.classes, shown.library.classes.join(""), what);
}

for (const {name, page} of pages) {
  test(`${name} in a browser`, () => {
    const {failed, problems, check, before, otherTile, wrongTile, pointed} = seen[name];
    assert.equal(failed, undefined);
    assert.deepEqual(problems, []);
    assert.match(check, /has found to be the same/);
    same(before, shownOf(page), "as loaded");
    assert.equal(before.title, name);
    assert.match(before.command, new RegExp(`^flashmask show ${name} --seqlen 300 --seed 1 --tile 16$`));
    assert.equal(otherTile.visible, before.visible);
    for (const n of [1, 2])
      assert.notEqual(otherTile.pictures[n], before.pictures[n], "order and load change with the tile");
    assert.match(wrongTile.error, /tile is '0'/);
    assert.match(pointed, /^Row \d+ (sees|does not see) key \d+, .* tile \(\d+, \d+\) is (skipped|partial|full)\.$/);
  });
}
