// SPDX-License-Identifier: Apache-2.0
// What the page computes, without a browser, against what the library said of the same mask: page_logic_test.mjs
// PROGRAM
import assert from "node:assert/strict";
import {writeFileSync} from "node:fs";
import {join} from "node:path";
import {test} from "node:test";
import vm from "node:vm";

import {familyNames, folder, pageOf, scriptOf, sees, shownOf} from "./pages.mjs";

const names = ["cellsOf", "classify", "dispatch", "hiddenRows", "longestFirst", "maskFromJson", "rowCounts"];

/// The functions of the page's logic.
function logicOf(page) {
  const context = vm.createContext({});
  vm.runInContext(`${scriptOf(page, "logic")}\nglobalThis.logic = {${names}};`, context);
  return context.logic;
}

const logic = logicOf(pageOf(["full"]));

/// Of another realm, in which the page's arrays are not this one's.
const plain = (value) => JSON.parse(JSON.stringify(value));

function visibleRows(mask, j) {
  const hidden = logic.hiddenRows(mask, j);
  return Array.from({length: mask.rows}, (_, i) => !hidden.some(([begin, end]) => i >= begin && i < end));
}

/// The page finds what the library found.
function check(words) {
  const shown = shownOf(pageOf(words)), mask = logic.maskFromJson(shown.mask), said = shown.library;
  const tiles = logic.classify(mask, {rows: shown.tile[0], keys: shown.tile[1]});
  assert.equal(tiles.visible, said.visible);
  assert.equal(tiles.classes.reduce((n, c) => n + (c === 1), 0), said.partial_tiles);
  assert.equal(tiles.classes.reduce((n, c) => n + (c === 2), 0), said.full_tiles);
  if (said.classes) assert.equal([...tiles.classes].join(""), said.classes.join(""));
  if (said.row_order) {
    const counts = logic.rowCounts(tiles);
    assert.deepEqual(plain(counts.map(({live}) => live)), said.row_counts);
    assert.deepEqual(plain(logic.longestFirst(counts)), said.row_order);
  }
  for (let j = 0; mask.keys <= 700 && j < mask.keys; ++j) {
    const expected = Array.from({length: mask.rows}, (_, i) => sees(shown.mask, i, j));
    assert.deepEqual(visibleRows(mask, j), expected, `key ${j}`);
  }
  return {shown, mask, tiles};
}

for (const family of familyNames()) {
  test(`${family}: tiles and order`, () => {
    for (const [seqlen, tile] of [[0, "8"], [1, "8"], [2, "1"], [7, "2x3"], [64, "8"], [100, "7x5"], [500, "64x128"],
      [700, "192x128"], [5000, "128"]]) {
      for (const seed of ["0", "9"]) check([family, "--seqlen", `${seqlen}`, "--tile", tile, "--seed", seed]);
    }
  });
}

// Draws that need no care to be the same on every run.
function pseudoRandom(seed) {
  let state = seed;
  return (low, high) => low + ((state = (state * 48271) % 2147483647) % (high - low + 1));
}

test("masks from files", () => {
  const draw = pseudoRandom(5);
  for (let n = 0; n < 40; ++n) {
    const mask = {seqlen_q: draw(1, 60), seqlen_k: draw(1, 60), q_offset: draw(-9, 9)};
    mask.band = {lo: draw(0, 1) ? draw(-40, 5) : null, hi: draw(0, 1) ? draw(-5, 40) : null};
    if (n % 2) {
      for (const name of ["lts", "lte", "uts", "ute"])
        if (draw(0, 1)) mask[name] = Array.from({length: mask.seqlen_k}, () => draw(-5, mask.seqlen_q + 5));
    } else {
      mask.column_ptr = [0];
      for (let j = 0; j < mask.seqlen_k; ++j) mask.column_ptr.push(mask.column_ptr[j] + draw(0, 9));
      mask.intervals = Array.from({length: 2 * mask.column_ptr[mask.seqlen_k]}, () => draw(-5, mask.seqlen_q + 5));
    }
    const file = join(folder, "mask.json");
    writeFileSync(file, JSON.stringify(mask));
    const {shown} = check([file, "--tile", `${draw(1, 20)}x${draw(1, 20)}`]);
    assert.equal(shown.family, null);
  }
});

test("cells hold what lies in them", () => {
  for (const words of ["prefix_tree --seqlen 230 --tile 16x24", "global_sliding_window --seqlen 300 --tile 5",
      "document --seqlen 90 --tile 64", "block_diffusion --seqlen 210 --tile 32x16 concatenated=1 lengths=50,55"]) {
    const {shown, mask, tiles} = check(words.split(" "));
    for (const most of [9, 40, 512]) {
      const cells = logic.cellsOf(mask, tiles, most), expected = {live: [], full: [], visible: []};
      assert.ok(cells.width <= most && cells.height <= most);
      for (const name of Object.keys(expected)) expected[name] = new Array(cells.width * cells.height).fill(0);
      for (let i = 0; i < mask.rows; ++i) {
        for (let j = 0; j < mask.keys; ++j) {
          const at = Math.floor(i / cells.rowStep) * cells.width + Math.floor(j / cells.keyStep);
          const rowTile = Math.floor(i / tiles.tile.rows), keyTile = Math.floor(j / tiles.tile.keys);
          const kind = tiles.classes[rowTile * tiles.keyTiles + keyTile];
          expected.live[at] += kind > 0;
          expected.full[at] += kind === 2;
          expected.visible[at] += sees(shown.mask, i, j);
        }
      }
      for (const name of Object.keys(expected))
        assert.deepEqual([...cells[name]], expected[name], `${words}, ${most} cells, ${name}`);
    }
  }
});

test("row tiles go to the first free worker", () => {
  const counts = [3, 5, 3, 4, 3].map((live) => ({live}));
  const loads = (queues) => queues.map((queue) => queue.reduce((n, {live}) => n + live, 0));
  const order = logic.longestFirst(counts);
  assert.deepEqual(plain(order), [1, 3, 0, 2, 4]);
  assert.deepEqual(plain(loads(logic.dispatch(counts, order, 1, 2))), [8, 10]);
  assert.deepEqual(plain(loads(logic.dispatch(counts, order, 2, 4))), [8, 8, 10, 10]);
});

/// What a document's elements do in a page's script: any property is another such, and what is put there stays.
function standIn(own = {}) {
  const primitive = () => 0;
  return new Proxy(() => {}, {
    get: (_, name) => (name === Symbol.toPrimitive ? primitive : (own[name] ??= standIn())),
    set: (_, name, value) => ((own[name] = name === "value" ? String(value) : value), true),
    apply: () => standIn(),
  });
}

/// The elements of a page, by id, after its script.
function elementsOf(page) {
  const byId = {shown: {textContent: scriptOf(page, "shown")}, workers: {value: "132"}, heads: {value: "16"}};
  const document = standIn({getElementById: (id) => (byId[id] ??= standIn({clientWidth: 800}))});
  const context = vm.createContext({document, window: standIn(), getComputedStyle: standIn()});
  vm.runInContext(`${scriptOf(page, "logic")}\n${/<script>([^]*?)<\/script>/.exec(page)[1]}`, context);
  return byId;
}

test("the script of a page runs to its end", () => {
  const said = {
    "causal_document": /^Band: j - i ≤ 0\. Rows LTS/,
    "full --seqlen 0": /^Band: none\. No vectors/,
    "dilated --seqlen 300 --tile 16": /^Band: none\. The lists have [\d,]+ runs/,
  };
  for (const [words, band] of Object.entries(said)) {
    const elements = elementsOf(pageOf(words.split(" ")));
    assert.equal(elements.error.hidden, true);
    assert.match(elements.check.textContent, /has found to be the same/);
    assert.match(elements.command.textContent, new RegExp(`^flashmask show ${words.split(" ")[0]} --seqlen`));
    assert.match(elements.band.textContent, band);
  }
});

test("what is in a page cannot end its script", () => {
  const {version} = shownOf(pageOf(["full"]));
  assert.match(version, /^\d+\.\d+\.\d+$/);
  const file = join(folder, "<b>.json");
  writeFileSync(file, JSON.stringify({seqlen_q: 4, seqlen_k: 4}));
  const page = pageOf([file]);
  assert.equal(shownOf(page).source, file);
  assert.ok(!page.includes("<b>"));
});

test("a page asks for nothing from elsewhere", () => {
  const page = pageOf(["causal"]);
  assert.doesNotMatch(page, /https?:|src=|href=|@import|url\(|@page_|@mask_js/);
});
