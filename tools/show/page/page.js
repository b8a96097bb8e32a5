// SPDX-License-Identifier: Apache-2.0
// The page: reads the controls, asks mask.js, draws. What the command said is in the JSON beside it.
"use strict";

const shown = JSON.parse(document.getElementById("shown").textContent);
const kCells = 512, kMostLines = 64, kMostItems = 1 << 18, kMostRuns = 16, kEdgeRuns = 6,
  kMostLetters = 100;

const byId = (id) => document.getElementById(id);
const grouped = (number) => number.toLocaleString("en-US");
const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "0 %");

function element(name, text, properties = {}) {
  return Object.assign(document.createElement(name), {textContent: text, ...properties});
}

// --- What the controls say.

/// A whole number from `low` to `high`; an error names the control.
function numberIn(id, low, high) {
  const text = byId(id).value.trim(), value = Number(text);
  need(/^\d+$/.test(text) && value >= low && value <= high,
    `${id} is '${text}'; it must be between ${grouped(low)} and ${grouped(high)}`);
  return value;
}

function readTile() {
  const text = byId("tile").value.trim(), parts = /^(\d+)(?:x(\d+))?$/.exec(text);
  const tile = parts && {rows: Number(parts[1]), keys: Number(parts[2] ?? parts[1])};
  need(tile && tile.rows >= 1 && tile.keys >= 1, `tile is '${text}'; it must be N, or ROWSxKEYS`);
  return tile;
}

const mask = maskFromJson(shown.mask);

/// All that is shown follows from this.
function compute() {
  const tile = readTile();
  const tileCount = Math.ceil(mask.rows / tile.rows) * Math.ceil(mask.keys / tile.keys);
  need(tileCount <= shown.most_tiles,
    `there are ${grouped(tileCount)} tiles; larger tiles make at most ${grouped(shown.most_tiles)}`);
  const tiles = classify(mask, tile), counts = rowCounts(tiles), order = longestFirst(counts);
  const heads = numberIn("heads", 1, 4096), workers = numberIn("workers", 1, 1024);
  need(heads * counts.length <= kMostItems,
    `${grouped(heads)} heads of ${grouped(counts.length)} row tiles are more than ${grouped(kMostItems)} items`);
  return {mask, tiles, counts, order, heads, workers, cells: cellsOf(mask, tiles, kCells)};
}

// --- Drawing.

/// A canvas as wide as its place, `height` pixels high; units are pixels.
function prepare(canvas, height) {
  const width = canvas.clientWidth || 640, ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.fillStyle = context.strokeStyle = getComputedStyle(canvas).color;
  context.font = "11px system-ui, sans-serif";
  return {context, width, height};
}

/// Near `count` round positions in [0, length].
function ticks(length, count) {
  const least = Math.max(length / count, 1);
  const step = [1, 2, 4, 8, 16].map((n) => n * 2 ** (4 * Math.floor(Math.log2(least) / 4))).find((n) => n >= least);
  return range(Math.floor(length / step) + 1, (n) => n * step);
}

/// Never close to none or all unless it is just that: a trace stays visible.
function share(part, whole) {
  return part === 0 || part === whole ? part / whole : Math.min(Math.max(part / whole, 1 / 8), 7 / 8);
}

/// One pixel for each cell, in the mixture of the colours of what lies in it.
function cellImage(mask, cells) {
  const {width, height, rowStep, keyStep} = cells;
  const {skipped, partial_hidden: hidden, partial_visible: seen, full: all} = shown.colours;
  const canvas = element("canvas", "", {width, height}), context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let at = 0; at < width * height; ++at) {
    const row = Math.floor(at / width) * rowStep, key = (at % width) * keyStep;
    const elements = Math.min(rowStep, mask.rows - row) * Math.min(keyStep, mask.keys - key);
    const full = share(cells.full[at], elements), visible = share(cells.visible[at], elements);
    const live = share(cells.live[at], elements);
    for (let c = 0; c < 3; ++c)
      image.data[4 * at + c] =
        full * all[c] + (visible - full) * seen[c] + (live - visible) * hidden[c] + (1 - live) * skipped[c];
    image.data[4 * at + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

/// Where the mask's plot lies on its canvas.
let plot = {left: 64, top: 22, width: 0, height: 0};

function drawMask({mask, tiles, cells}) {
  const canvas = byId("mask"), available = Math.min((canvas.clientWidth || 640) - plot.left - 24, 640);
  const pixels = available / Math.max(mask.rows, mask.keys, 1);
  plot = {...plot,
    width: Math.max(mask.keys * pixels, available / 8), height: Math.max(mask.rows * pixels, available / 8)};
  const {context} = prepare(canvas, plot.top + plot.height + 8);
  drawAxes(context, mask);
  if (!mask.rows || !mask.keys) return;
  context.save();
  context.beginPath();
  context.rect(plot.left, plot.top, plot.width, plot.height);
  context.clip();
  context.imageSmoothingEnabled = false;
  const ofCells =
    [(plot.width / mask.keys) * cells.width * cells.keyStep, (plot.height / mask.rows) * cells.height * cells.rowStep];
  context.drawImage(cellImage(mask, cells), plot.left, plot.top, ...ofCells);
  drawLines(context, mask, {rows: 1, keys: 1}, "#ffffff80");
  const narrow = Math.min((tiles.tile.keys * plot.width) / mask.keys, (tiles.tile.rows * plot.height) / mask.rows) < 20;
  drawLines(context, mask, tiles.tile, narrow ? "#1f29331f" : "#1f293366");
  context.restore();
}

/// At every `step` elements, unless that is too many lines.
function drawLines(context, mask, step, colour) {
  if (mask.rows / step.rows > kMostLines || mask.keys / step.keys > kMostLines) return;
  context.strokeStyle = colour;
  context.beginPath();
  for (let key = step.keys; key < mask.keys; key += step.keys) {
    const x = plot.left + (key * plot.width) / mask.keys;
    context.moveTo(x, plot.top), context.lineTo(x, plot.top + plot.height);
  }
  for (let row = step.rows; row < mask.rows; row += step.rows) {
    const y = plot.top + (row * plot.height) / mask.rows;
    context.moveTo(plot.left, y), context.lineTo(plot.left + plot.width, y);
  }
  context.stroke();
}

function drawAxes(context, mask) {
  context.textBaseline = "middle";
  context.textAlign = "center";
  for (const key of ticks(mask.keys, 8))
    context.fillText(grouped(key), plot.left + (key * plot.width) / Math.max(mask.keys, 1), 10);
  context.textAlign = "right";
  for (const row of ticks(mask.rows, 8))
    context.fillText(grouped(row), plot.left - 8, plot.top + (row * plot.height) / Math.max(mask.rows, 1));
}

const css = ([r, g, b]) => `rgb(${r}, ${g}, ${b})`;

/// One bar for each row tile, in the order in which they are handed out.
function drawOrder({counts, order}) {
  const {context, width, height} = prepare(byId("order"), 150);
  const top = 12, bottom = 20, left = 64, most = Math.max(order.length ? counts[order[0]].live : 0, 1);
  const step = Math.min((width - left) / Math.max(order.length, 1), 40), unit = (height - top - bottom) / most;
  const bar = (rank, from, to, colour) => {
    context.fillStyle = css(colour);
    context.fillRect(left + rank * step, height - bottom - to * unit,
      Math.max(step - (step > 4 ? 1 : 0), 0.5), (to - from) * unit);
  };
  const ink = context.fillStyle;
  order.forEach((rowTile, rank) => {
    const {live, full} = counts[rowTile];
    bar(rank, 0, full, shown.colours.full);
    bar(rank, full, live, shown.colours.partial_visible);
  });
  context.fillStyle = ink;
  context.textAlign = "center";
  const every = Math.ceil(32 / step);
  order.forEach((rowTile, rank) => {
    if (rank % every === 0) context.fillText(grouped(rowTile), left + (rank + 0.5) * step, height - 6);
  });
  context.textAlign = "right";
  context.fillText(grouped(most), left - 8, top + 4);
  context.fillText("row tile", left - 8, height - 6);
}

/// One column for each multiprocessor, an item on top of those that it took before.
function drawLoad(queues, most, ideal) {
  const {context, width, height} = prepare(byId("load"), 190);
  const top = 12, bottom = 8, left = 64, step = Math.min((width - left) / queues.length, 40);
  const unit = (height - top - bottom) / Math.max(most, 1);
  const ink = context.fillStyle, base = height - bottom;
  queues.forEach((queue, worker) => {
    let load = 0;
    queue.forEach(({live}, n) => {
      context.fillStyle = n % 2 ? "#7fa9da" : css(shown.colours.full);
      context.fillRect(left + worker * step, base - (load + live) * unit,
      Math.max(step - (step > 4 ? 1 : 0), 0.5), live * unit);
      load += live;
    });
  });
  context.fillStyle = ink;
  context.fillRect(left, base - ideal * unit, step * queues.length, 1);
  context.textAlign = "right";
  context.fillText(grouped(most), left - 8, top + 4);
  if (ideal < 0.9 * most) context.fillText(`mean ${ideal.toFixed(1)}`, left - 4, base - ideal * unit + 4);
}

// --- Words.

const loadOf = (queue) => sum(queue.map((item) => item.live));

function showLoad({counts, order, heads, workers}) {
  const most = (queues) => Math.max(...queues.map(loadOf));
  const queues = dispatch(counts, order, heads, workers), longest = most(queues);
  const asNumbered = most(dispatch(counts, range(counts.length, (r) => r), heads, workers));
  const ideal = sum(queues.map(loadOf)) / workers;
  drawLoad(queues, longest, ideal);
  byId("load-text").textContent =
    `Live tiles of each of ${grouped(workers)} multiprocessors that take the next row tile of ${grouped(heads)} ` +
    `heads when they are free, all tiles taking the same time. The last is done after ${grouped(longest)} tiles, and ` +
    `on average they are busy for ${percent(ideal, longest)} of that time. With the row tiles in ascending order the ` +
    `last would be done after ${grouped(asNumbered)}.`;
}

function showFigures({mask, tiles}) {
  const count = (kind) => tiles.classes.reduce((n, c) => n + (c === kind), 0), all = tiles.classes.length;
  const figures = [
    [percent(tiles.visible, mask.rows * mask.keys), "of the elements visible"],
    ...[["skipped", kEmpty], ["partial", kPartial], ["full", kFull]].map(([name, kind]) => [
      percent(count(kind), all), `${grouped(count(kind))} of ${grouped(all)} tiles ${name}`,
    ]),
  ];
  byId("figures").replaceChildren(...figures.map(([value, text]) => {
    const box = element("div", "", {className: "figure"});
    box.append(element("b", value), element("span", text));
    return box;
  }));
}

function showLegend({cells}) {
  const {skipped, partial_hidden: hidden, partial_visible: seen, full} = shown.colours;
  const kinds =
    [["skipped tile", skipped], ["partial tile: visible", seen], ["partial tile: hidden", hidden], ["full tile", full]];
  byId("legend").replaceChildren(...kinds.map(([text, colour]) => {
    const entry = element("span", "");
    const swatch = element("i", "");
    swatch.style.background = css(colour);
    entry.append(swatch, text);
    return entry;
  }));
  if (cells.rowStep * cells.keyStep > 1)
    byId("legend").append(element("span",
      `one cell: ${grouped(cells.rowStep)} x ${grouped(cells.keyStep)} elements, mixing their colours`));
}

function showOrder({counts, order, tiles}) {
  byId("order-text").textContent =
    `Rows of ${grouped(tiles.tile.rows)} x ${grouped(tiles.tile.keys)} tiles, those with most live tiles first: ` +
    order.slice(0, 12).map((r) => `${grouped(r)} (${grouped(counts[r].live)})`).join(", ") +
    (order.length > 12 ? ", ..." : ".");
}

/// Columns [begin, end) whose cells(j) are the same.
function equalRuns(cells, keys) {
  const runs = [];
  for (let j = 0; j < keys; ++j) {
    const last = runs[runs.length - 1], own = cells(j);
    if (last && last.cells.every((cell, n) => cell === own[n])) last.end = j + 1;
    else runs.push({begin: j, end: j + 1, cells: own});
  }
  return runs;
}

function rowsText(runs) {
  return runs.map(([begin, end]) => `[${grouped(begin)}, ${grouped(end)})`).join(", ");
}

function listText({columnPtr, intervals}, j) {
  const first = columnPtr[j];
  return rowsText(range(columnPtr[j + 1] - first, (n) => intervals.slice(2 * (first + n), 2 * (first + n + 1))));
}

/// Runs of rows, cut between two of them.
function shortened(text) {
  return text.length > kMostLetters ? `${text.slice(0, text.lastIndexOf(", [", kMostLetters) + 1)} ...` : text;
}

function showVectors({mask}) {
  const edge = (value, word) => (Number.isFinite(value) ? [`j - i ${word} ${grouped(value)}`] : []);
  const edges = [...edge(mask.lo, "\u2265"), ...edge(mask.hi, "\u2264")];
  const names = ["lts", "lte", "uts", "ute"].filter((name) => mask[name]);
  const heads = mask.columnPtr ? ["hidden rows"] : names.map((name) => name.toUpperCase());
  byId("vectors-title").textContent = mask.columnPtr ? "Interval lists" : "Vectors";
  byId("vectors").className = mask.columnPtr ? "lists" : "";
  byId("band").textContent =
    `Band: ${edges.length ? edges.join(" and ") : "none"}. ` +
    (mask.columnPtr ? `The lists have ${grouped(mask.intervals.length / 2)} runs of rows that do not see a key.` :
      names.length ? "Rows LTS up to LTE and UTS up to UTE do not see the key; a missing start is the first row, " +
      "a missing end the last." : "No vectors.");
  const cells = mask.columnPtr ? (j) => [listText(mask, j)] : (j) => names.map((name) => grouped(mask[name][j]));
  const runs = heads.length ? equalRuns(cells, mask.keys) : [], rows = [];
  runs.forEach((run, n) => {
    if (runs.length > kMostRuns && n >= kEdgeRuns && n < runs.length - kEdgeRuns) {
      if (n === kEdgeRuns) rows.push([`... ${grouped(runs.length - 2 * kEdgeRuns)} more`]);
      return;
    }
    rows.push([`[${grouped(run.begin)}, ${grouped(run.end)})`, ...run.cells.map(shortened)]);
  });
  const line = (kind, texts) => {
    const row = element("tr", "");
    row.append(...texts.map((text) => element(kind, text)));
    return row;
  };
  byId("vectors").replaceChildren(
    ...(heads.length ? [line("th", ["keys", ...heads])] : []),
    ...rows.map((texts) => line("td", texts)));
}

function showCommand() {
  byId("command-section").hidden = !shown.family;
  const parameters = Object.entries(shown.parameters).map(([name, value]) => ` ${name}=${value}`);
  byId("command").textContent =
    `flashmask show ${shown.source}${parameters.join("")} --seqlen ${shown.seqlen} --seed ${shown.seed} ` +
    `--tile ${byId("tile").value}`;
}

/// While the controls are as the command left them, the page must say what the command said.
function differences({mask, tiles, counts, order}) {
  const said = shown.library, wrong = [], same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
  const count = (kind) => tiles.classes.reduce((n, c) => n + (c === kind), 0);
  const check = (what, agrees) => agrees || wrong.push(what);
  check("visible elements", tiles.visible === said.visible);
  check("tiles", count(kPartial) === said.partial_tiles && count(kFull) === said.full_tiles);
  if (said.classes) check("tile classes", [...tiles.classes].join("") === said.classes.join(""));
  if (said.row_order) check("order", same(order, said.row_order) && same(counts.map((c) => c.live), said.row_counts));
  return wrong;
}

// --- Putting it together.

let state = null;

function update() {
  byId("error").hidden = true;
  byId("content").classList.remove("stale");
  try {
    state = compute();
  } catch (error) {
    byId("error").textContent = error.message;
    byId("error").hidden = false;
    byId("content").classList.add("stale");
    return;
  }
  for (const show of [showFigures, showLegend, drawMask, showOrder, drawOrder, showLoad, showVectors, showCommand])
    show(state);
}

function point(event) {
  const {mask, tiles} = state, j = Math.floor(((event.offsetX - plot.left) / plot.width) * mask.keys);
  const i = Math.floor(((event.offsetY - plot.top) / plot.height) * mask.rows);
  if (!(i >= 0 && i < mask.rows && j >= 0 && j < mask.keys)) return;
  const hidden = hiddenRows(mask, j), sees = !hidden.some(([begin, end]) => i >= begin && i < end);
  const [r, k] = [Math.floor(i / tiles.tile.rows), Math.floor(j / tiles.tile.keys)];
  const runs = shortened(rowsText(hidden)) || "no rows";
  byId("pointed").textContent =
    `Row ${grouped(i)} ${sees ? "sees" : "does not see"} key ${grouped(j)}, which is hidden from ${runs}; ` +
    `tile (${grouped(r)}, ${grouped(k)}) is ${["skipped", "partial", "full"][tiles.classes[r * tiles.keyTiles + k]]}.`;
}

function start() {
  byId("title").textContent = document.title = shown.source;
  byId("definition").textContent = shown.definition ? `Visible: ${shown.definition}.` : "";
  byId("tile").value = shown.tile[0] === shown.tile[1] ? shown.tile[0] : shown.tile.join("x");
  update();
  const wrong = state ? differences(state) : ["the mask itself"];
  byId("check").textContent = wrong.length
    ? `Made by flashmask ${shown.version}, which says otherwise about: ${wrong.join(", ")}.`
    : `Made by flashmask ${shown.version}, whose tiles and order this page has found to be the same.`;
  byId("controls").addEventListener("input", update);
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("mask").addEventListener("mousemove", (event) => state && point(event));
  window.addEventListener("resize", update);
}

start();
