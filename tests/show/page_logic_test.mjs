// SPDX-License-Identifier: Apache-2.0
// What the page computes, without a browser, against what the library said of the same mask: page_logic_test.mjs
// PROGRAM
import assert from "node:assert/strict";
import {writeFileSync} from "node:fs";
import {join} from "node:path";
import {test} from "node:test";
import vm from "node:vm";

import {familyNames, folder, pageOf, scriptOf, sees, shownOf, takes} from "./pages.mjs";

const names = ["Parameters", "cellsOf", "classify", "dispatch", "families", "hiddenRows", "longestFirst",
  "maskFromJson", "rowCounts"];

/// The functions of the page's logic.
function logicOf(page) {
  const context = vm.createContext({});
  vm.runInContext(`${scriptOf(page, "logic")}\nglobalThis.logic = {${names}};`, context);
  return context.logic;
}

const logic = logicOf(pageOf(["full"]));

/// Of another realm, in which the page's arrays are not this one's.
const plain = (value) => JSON.parse(JSON.stringify(value));

function maskOf(shown) {
  if (shown.family === null) return logic.maskFromJson(shown.mask);
  return logic.families[shown.family](new logic.Parameters(shown.seqlen, shown.parameters, shown.seed, shown.batch));
}

function visibleRows(mask, j) {
  const hidden = logic.hiddenRows(mask, j);
  return Array.from({length: mask.rows}, (_, i) => !hidden.some(([begin, end]) => i >= begin && i < end));
}

/// The page finds what the library found.
function check(words) {
  const shown = shownOf(pageOf(words)), mask = maskOf(shown), said = shown.library;
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
  for (let j = 0; shown.mask && j < mask.keys; ++j) {
    const expected = Array.from({length: mask.rows}, (_, i) => sees(shown.mask, i, j));
    assert.deepEqual(visibleRows(mask, j), expected, `key ${j}`);
  }
  return {shown, mask, tiles};
}

for (const family of familyNames()) {
  test(`${family}: vectors, tiles and order`, () => {
    for (const [seqlen, tile] of [[0, "8"], [1, "8"], [2, "1"], [7, "2x3"], [64, "8"], [100, "7x5"], [500, "64x128"],
      [700, "192x128"], [5000, "128"]]) {
      for (const seed of ["0", "9"]) check([family, "--seqlen", `${seqlen}`, "--tile", tile, "--seed", seed]);
    }
  });
}

test("every family is there, and there is no other", () =>
  assert.deepEqual(plain(Object.keys(logic.families)).sort(), familyNames().sort()));

const given = [
  "causal q_offset=5", "causal q_offset=-5", "sliding_window left=3 right=-1", "sliding_window left=-1 right=2",
  "sliding_window left=0",
  "sliding_window left=1125899906842624 right=2251799813685248",
  "causal_document lengths=5,0,7,28", "document lengths=40", "shared_question groups=20,20 answers=3,0",
  "shared_question groups=8,32 answers=6",
  "global_sliding_window global=0 window=3", "global_sliding_window global=99 window=0",
  "causal_blockwise lengths=10,20,10",
  "prefix_lm_causal prefix=0", "prefix_lm_causal prefix=40", "prefix_lm_document lengths=10,30 prefix=10,0",
  "qk_sparse spans=3,9,9,20",
  "qk_sparse spans=4,4", "hash_sparse buckets=3", "hash_sparse causal=0", "random_eviction seed=-1",
  "random_eviction seed=9223372036854775807",
  "prefix_tree parents=-1,0,1,0,-1", "prefix_tree parents=-1,0,0 lengths=10,0,30", "padding key_lengths=7",
  "padding key_lengths=7 query_lengths=9",
  "padding key_lengths=7,11,40 --batch 1", "random_eviction --seed 9223372036854775807",
  "attention_sink_window lengths=10,0,30 sink=2 window=5", "attention_sink_window sink=99",
  "attention_sink_window sink=0 window=-1",
  "block_causal blocks=7", "block_causal lengths=10,0,30 blocks=4 window=2",
  "block_causal lengths=10,30 blocks=5,0,20,15 window=2",
  "causal_with_blocks blocks=3,9,9,9,9,20,30,40", "causal_with_blocks lengths=10,0,30 blocks=2,10,15,15,30,38 window=3",
  "causal_with_blocks lengths=10,30 window=5", "block_causal blocks=40", "block_causal blocks=99 window=1",
  "block_diffusion blocks=7", "block_diffusion lengths=10,0,10 blocks=4",
  "block_diffusion lengths=5,15 blocks=4,0,11,5", "block_diffusion blocks=20",
  "block_diffusion concatenated=1", "block_diffusion concatenated=1 blocks=4,0,11,5",
  "block_diffusion concatenated=1 lengths=4,0,16,0 blocks=4",
  "eagle3_ttt steps=1", "eagle3_ttt steps=3", "eagle3_ttt steps=3 lengths=4,0,9", "eagle3_ttt steps=99",
  "dflash anchors=0,3,3,9 block=4", "dflash anchors=2,9,30 block=3 lengths=9,0,22",
  "dflash anchors=2,31 block=3 lengths=9,0,25,0", "dflash block=7",
  "dflash block=99", "dflash anchors=0 block=40",
];
for (const words of given) {
  test(`given: ${words}`, () => check([...words.split(" "), "--seqlen", "40", "--tile", "4"]));
}

const refused = [
  "causal q_offset=x", "causal q_offset=1,2", "sliding_window left=-2", "causal_document lengths=3,4",
  "causal_document lengths=-1,41",
  "shared_question groups=40 answers=-1", "shared_question groups=2,38 answers=6",
  "shared_question groups=40 answers=1,2",
  "global_sliding_window global=-1", "prefix_lm_causal prefix=41", "prefix_lm_document lengths=40 prefix=41",
  "prefix_lm_document lengths=40 prefix=1,2", "qk_sparse spans=1,2,3", "qk_sparse spans=5,3", "qk_sparse spans=1,41",
  "hash_sparse buckets=0",
  "hash_sparse query_buckets=1,2", `hash_sparse causal=0 query_buckets=${"0,1,".repeat(20).slice(0, -1)}`,
  "eviction evicted_at=1,2",
  "prefix_tree parents=0", "prefix_tree parents=-1,0,-1,1", "prefix_tree parents=-1,0 lengths=40",
  "padding key_lengths=41",
  "padding key_lengths=7 query_lengths=1,2", "attention_sink_window sink=-1", "attention_sink_window window=0",
  "attention_sink_window lengths=41",
  "block_causal blocks=0", "block_causal blocks=-3", "block_causal blocks=20,19", "block_causal window=0",
  "block_causal lengths=41",
  "causal_with_blocks blocks=1,2,3", "causal_with_blocks blocks=5,3", "causal_with_blocks blocks=1,41",
  "causal_with_blocks window=0",
  "causal_with_blocks lengths=10,30 blocks=9,11",
  "block_diffusion blocks=0", "block_diffusion blocks=10,9", "block_diffusion lengths=40",
  "block_diffusion concatenated=1 lengths=10,10 blocks=4",
  "eagle3_ttt steps=0", "eagle3_ttt steps=3 lengths=40",
  "dflash block=0", "dflash anchors=3,1", "dflash anchors=-1", "dflash anchors=39 block=2",
  "dflash anchors=1,2,3 block=14", "dflash lengths=40",
];
for (const words of refused) {
  test(`refused as by the program: ${words.slice(0, 60)}`, () => {
    const [family, ...pairs] = words.split(" ");
    assert.ok(!takes([family, ...pairs, "--seqlen", "40"]), "the program takes it");
    const texts = Object.fromEntries(pairs.map((pair) => pair.split("=")));
    assert.throws(() => logic.families[family](new logic.Parameters(40, texts, "0", 0)), {message: /./});
  });
}

test("refused as by the program: an odd length of concatenated copies", () => {
  assert.ok(!takes(["block_diffusion", "concatenated=1", "--seqlen", "41"]));
  assert.throws(() => logic.families.block_diffusion(new logic.Parameters(41, {concatenated: "1"}, "0", 0)),
    {message: /even/});
});

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
    for (const name of ["lts", "lte", "uts", "ute"]) {
      if (draw(0, 1)) mask[name] = Array.from({length: mask.seqlen_k}, () => draw(-5, mask.seqlen_q + 5));
    }
    const file = join(folder, "mask.json");
    writeFileSync(file, JSON.stringify(mask));
    const {shown} = check([file, "--tile", `${draw(1, 20)}x${draw(1, 20)}`]);
    assert.equal(shown.family, null);
  }
});

test("cells hold what lies in them", () => {
  for (const words of ["prefix_tree --seqlen 230 --tile 16x24", "global_sliding_window --seqlen 300 --tile 5",
      "document --seqlen 90 --tile 64"]) {
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
  assert.doesNotMatch(page, /https?:|src=|href=|@import|url\(|@page_|@mask_js|@families_js/);
});
