// SPDX-License-Identifier: Apache-2.0
// Masks in the browser: which rows a key is hidden from, tile classes, order and load, the cells of a drawing. No part
// of it knows the page.
"use strict";

function need(condition, message) {
  if (!condition) throw new Error(message);
}

function range(count, value) {
  return Array.from({length: count}, (_, n) => value(n));
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

/// A mask as the library writes it in JSON, as {rows, keys, lo, hi, lts, lte, uts, ute, columnPtr, intervals}: row i
/// sees key j only if lo <= j - i <= hi; vectors may be left out, and so may interval lists, which take their place.
function maskFromJson(json) {
  const {lts, lte, uts, ute, band, q_offset: offset} = json;
  const edge = (value, otherwise) => (value === null ? otherwise : value + offset);
  return {rows: json.seqlen_q, keys: json.seqlen_k, lo: edge(band.lo, -Infinity), hi: edge(band.hi, Infinity),
    lts, lte, uts, ute, columnPtr: json.column_ptr, intervals: json.intervals};
}

// --- Which rows of a key are hidden, and what class a tile is: the method of docs/mask.md, "From a mask to tiles".

const sorted = new Int32Array(8);

/// Calls f(begin, end) for the runs of rows that a key is hidden from, ascending and with gaps between them. It
/// allocates nothing: a long mask asks for every key while its reader types.
function eachHiddenRun(mask, j, f) {
  if (mask.columnPtr) return eachListedRun(mask, j, f);
  let count = 0;
  const add = (from, to) => {
    const begin = Math.max(from, 0), end = Math.min(to, mask.rows);
    if (begin >= end) return;
    let at = 2 * count++;
    for (; at > 0 && sorted[at - 2] > begin; at -= 2) [sorted[at], sorted[at + 1]] = [sorted[at - 2], sorted[at - 1]];
    [sorted[at], sorted[at + 1]] = [begin, end];
  };
  const addStored = (begin, end) => (begin || end) && add(begin ? begin[j] : 0, end ? end[j] : mask.rows);
  add(0, j - mask.hi);
  add(j + 1 - mask.lo, mask.rows);
  addStored(mask.lts, mask.lte);
  addStored(mask.uts, mask.ute);
  for (let at = 0; at < 2 * count;) {
    const begin = sorted[at];
    let end = sorted[at + 1];
    for (at += 2; at < 2 * count && sorted[at] <= end; at += 2) end = Math.max(end, sorted[at + 1]);
    f(begin, end);
  }
}

/// Calls f for the runs of the band and a key's interval list, which ascends with gaps between its intervals.
function eachListedRun(mask, j, f) {
  const {rows, columnPtr, intervals} = mask, bottom = Math.min(Math.max(j + 1 - mask.lo, 0), rows);
  let begin = 0, end = Math.min(Math.max(j - mask.hi, 0), rows);
  const put = (from, to) => {
    if (from > end) {
      if (begin < end) f(begin, end);
      begin = from;
    }
    end = Math.max(end, to);
  };
  for (let n = columnPtr[j]; n < columnPtr[j + 1] && intervals[2 * n] < bottom; ++n)
    put(intervals[2 * n], intervals[2 * n + 1]);
  if (bottom < rows) put(bottom, rows);
  if (begin < end) f(begin, end);
}

function hiddenRows(mask, j) {
  const runs = [];
  eachHiddenRun(mask, j, (begin, end) => runs.push([begin, end]));
  return runs;
}

function merged(runs) {
  const result = [];
  for (const [begin, end] of runs.filter((run) => run[0] < run[1]).sort((a, b) => a[0] - b[0])) {
    const last = result[result.length - 1];
    if (last && begin <= last[1]) last[1] = Math.max(last[1], end);
    else result.push([begin, end]);
  }
  return result;
}

/// What the runs leave of [0, length).
function complement(runs, length) {
  const ends = merged(runs);
  return [...ends, [length, length]].map((run, n) => [n ? ends[n - 1][1] : 0, run[0]]).filter((run) => run[0] < run[1]);
}

const kEmpty = 0, kPartial = 1, kFull = 2;

/// The class of every tile, row by row, and the number of visible elements.
function classify(mask, tile) {
  const rowTiles = Math.ceil(mask.rows / tile.rows), keyTiles = Math.ceil(mask.keys / tile.keys);
  const classes = new Uint8Array(rowTiles * keyTiles);
  let visible = mask.rows * mask.keys;
  for (let k = 0; k < keyTiles; ++k) {
    const begin = k * tile.keys, end = Math.min(begin + tile.keys, mask.keys);
    const covered = new Int32Array(rowTiles + 1), touched = new Int32Array(rowTiles + 1);
    for (let j = begin; j < end; ++j) {
      eachHiddenRun(mask, j, (from, to) => {
        visible -= to - from;
        const first = Math.ceil(from / tile.rows), past = to === mask.rows ? rowTiles : Math.floor(to / tile.rows);
        if (first < past) ++covered[first], --covered[past];
        ++touched[Math.floor(from / tile.rows)], --touched[Math.ceil(to / tile.rows)];
      });
    }
    for (let r = 0, covers = 0, touches = 0; r < rowTiles; ++r) {
      covers += covered[r];
      touches += touched[r];
      classes[r * keyTiles + k] = covers === end - begin ? kEmpty : touches === 0 ? kFull : kPartial;
    }
  }
  return {tile, rowTiles, keyTiles, classes, visible};
}

// --- The plan: what each row of tiles has to do, in which order it is handed out, and how much each worker then does.

/// Live and full tiles of each row of tiles.
function rowCounts({rowTiles, keyTiles, classes}) {
  return range(rowTiles, (r) => {
    const row = classes.subarray(r * keyTiles, (r + 1) * keyTiles);
    return {live: row.reduce((n, c) => n + (c !== kEmpty), 0), full: row.reduce((n, c) => n + (c === kFull), 0)};
  });
}

/// Row tiles with most live tiles first; equal counts keep ascending order.
function longestFirst(counts) {
  return range(counts.length, (r) => r).sort((a, b) => counts[b].live - counts[a].live);
}

/// The load of each worker when the row tiles, each once for every head, go in this order to the first free worker:
/// lists of {rowTile, live}.
function dispatch(counts, order, heads, workers) {
  const queues = range(workers, () => []), busy = new Array(workers).fill(0);
  for (const rowTile of order) {
    for (let head = 0; head < heads; ++head) {
      const free = busy.indexOf(Math.min(...busy));
      queues[free].push({rowTile, live: counts[rowTile].live});
      busy[free] += counts[rowTile].live;
    }
  }
  return queues;
}

// --- Cells, for a drawing of a mask of any length.

/// Elements of a cell: as few as `most` cells allow, rounded up to whole cells a tile or whole tiles a cell where that
/// costs less than half of the cells.
function cellStep(length, most, tile) {
  const fewest = Math.max(Math.ceil(length / most), 1);
  for (let step = fewest; step < 2 * fewest; ++step) {
    if (tile % step === 0 || step % tile === 0) return step;
  }
  return fewest;
}

/// Adds up intervals of [0, length): how many of their elements lie in each cell. One costs the same whatever its
/// length.
class CellCounter {
  constructor(length, step) {
    this.length = length;
    this.step = step;
    // Of intervals from a place to the end: elements in that place's own cell, and how many of them have all of the
    // next cells.
    const places = Math.ceil(length / step) + 2;
    [this.within, this.onward] = [new Int32Array(places), new Int32Array(places)];
    this.sizes = range(Math.ceil(length / step), (cell) => Math.min(step, length - cell * step));
    this.counts = new Float64Array(this.sizes.length);
  }

  add(begin, end) {
    this.addFrom(begin, 1);
    this.addFrom(end, -1);
  }

  addFrom(place, sign) {
    const cell = Math.floor(place / this.step);
    this.within[cell] += sign * (Math.min((cell + 1) * this.step, this.length) - place);
    this.onward[cell + 1] += sign;
  }

  /// The elements of all cells since the last call; valid until the next one.
  take() {
    for (let cell = 0, intervals = 0; cell < this.counts.length; ++cell) {
      intervals += this.onward[cell];
      this.counts[cell] = this.within[cell] + intervals * this.sizes[cell];
    }
    this.within.fill(0);
    this.onward.fill(0);
    return this.counts;
  }
}

/// What lies in each cell, row by row, in elements: those of live and of full tiles, and the visible ones.
function cellsOf(mask, tiles, most) {
  const rowStep = cellStep(mask.rows, most, tiles.tile.rows), keyStep = cellStep(mask.keys, most, tiles.tile.keys);
  const height = Math.ceil(mask.rows / rowStep), width = Math.ceil(mask.keys / keyStep);
  const empty = () => new Float64Array(width * height);
  const cells = {width, height, rowStep, keyStep, live: empty(), full: empty(), visible: empty()};
  addVisible(mask, cells);
  addTiles(mask, tiles, cells);
  return cells;
}

function addVisible(mask, {width, rowStep, keyStep, visible}) {
  const hidden = new CellCounter(mask.rows, rowStep);
  for (let k = 0; k < width; ++k) {
    const begin = k * keyStep, end = Math.min(begin + keyStep, mask.keys);
    for (let j = begin; j < end; ++j) eachHiddenRun(mask, j, (from, to) => hidden.add(from, to));
    const counts = hidden.take();
    for (let r = 0; r < counts.length; ++r) visible[r * width + k] = (end - begin) * hidden.sizes[r] - counts[r];
  }
}

function addTiles(mask, {tile, rowTiles, keyTiles, classes}, {width, rowStep, keyStep, live, full}) {
  const ofLive = new CellCounter(mask.rows, rowStep), ofFull = new CellCounter(mask.rows, rowStep);
  for (let t = 0; t < keyTiles; ++t) {
    for (let r = 0, first = 0; r < rowTiles; ++r) {
      const kind = classes[r * keyTiles + t], isLast = r + 1 === rowTiles;
      if (!isLast && classes[(r + 1) * keyTiles + t] === kind) continue;
      const from = first * tile.rows, to = isLast ? mask.rows : (r + 1) * tile.rows;
      if (kind !== kEmpty) ofLive.add(from, to);
      if (kind === kFull) ofFull.add(from, to);
      first = r + 1;
    }
    const begin = t * tile.keys, end = Math.min(begin + tile.keys, mask.keys);
    const liveRows = ofLive.take(), fullRows = ofFull.take();
    for (let k = Math.floor(begin / keyStep); k * keyStep < end; ++k) {
      const keys = Math.min(end, (k + 1) * keyStep) - Math.max(begin, k * keyStep);
      for (let r = 0; r < liveRows.length; ++r) {
        live[r * width + k] += liveRows[r] * keys;
        full[r * width + k] += fullRows[r] * keys;
      }
    }
  }
}
