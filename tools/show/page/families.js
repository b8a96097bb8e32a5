// SPDX-License-Identifier: Apache-2.0
// Masks in the browser, here their families and in mask.js what follows from a mask; the page has both in one script.
// No part of it knows the page. It says what the library says, number for number, the random draws included; tests/show
// holds the two together.
"use strict";

/// The library's generator, the C++ standard's mt19937_64, which is the same on every platform.
class Random {
  constructor(seed) {
    this.state = new BigUint64Array(312);
    this.state[0] = seed;
    for (let n = 1; n < 312; ++n) {
      const before = this.state[n - 1];
      this.state[n] = 6364136223846793005n * (before ^ (before >> 62n)) + BigInt(n);
    }
    this.at = 312;
  }

  next() {
    if (this.at === 312) this.twist();
    let x = this.state[this.at++];
    x ^= (x >> 29n) & 0x5555555555555555n;
    x ^= (x << 17n) & 0x71d67fffeda60000n;
    x ^= (x << 37n) & 0xfff7eee000000000n;
    return x ^ (x >> 43n);
  }

  twist() {
    const state = this.state;
    for (let n = 0; n < 312; ++n) {
      const x = (state[n] & 0xffffffff80000000n) | (state[(n + 1) % 312] & 0x7fffffffn);
      state[n] = state[(n + 156) % 312] ^ (x >> 1n) ^ (x & 1n ? 0xb5026f5aa96619e9n : 0n);
    }
    this.at = 0;
  }

  /// Uniform in [low, high].
  integer(low, high) {
    return low + Number(this.next() % BigInt(high - low + 1));
  }
  /// Uniform in [0, 1).
  real() {
    return Number(this.next() >> 11n) * 2 ** -53;
  }
}

function need(condition, message) {
  if (!condition) throw new Error(message);
}

function sum(values) {
  return values.reduce((a, b) => a + b, 0);
}

/// Reads a family's parameters, given as text; what is left out is drawn, and kept in `chosen`.
class Parameters {
  constructor(seqlen, texts, seed, entry) {
    this.seqlen = seqlen;
    this.texts = texts;
    this.random = new Random(BigInt(seed));
    this.entry = entry;  // of the batch, for a family that has one mask for each
    this.chosen = {};
  }

  text(name) {
    const text = (this.texts[name] ?? "").trim();
    need(/^(-?\d+(,-?\d+)*)?$/.test(text), `${name} is '${text}'; it must be integers separated by commas`);
    return text;
  }

  /// The integers of a parameter; none if it is not given.
  integers(name) {
    const text = this.text(name);
    const values = text ? text.split(",").map(Number) : [];
    need(values.every(Number.isSafeInteger), `${name} has a number beyond 2^53`);
    return values;
  }

  integer(name, otherwise) {
    const values = this.integers(name);
    need(values.length <= 1, `${name} takes one integer, not ${values.length}`);
    return values.length ? values[0] : this.choose(name, otherwise);
  }

  /// Lengths that add up to `total`.
  lengths(name, total = this.seqlen) {
    const values = this.integers(name);
    if (!values.length) return this.choose(name, this.drawLengths(this.random.integer(3, 7)));
    need(values.every((length) => length >= 0), `${name} has a negative length`);
    need(sum(values) === total, `${name} adds up to ${sum(values)}; it must be ${total}`);
    return values;
  }

  /// Lengths of documents: those given, or one of all.
  documents(name, total = this.seqlen) {
    return this.integers(name).length ? this.lengths(name, total) : this.choose(name, [total]);
  }

  positive(name, otherwise) {
    const value = this.integer(name, otherwise);
    need(value >= 1, `${name} is ${value}; it must be at least 1`);
    return value;
  }

  /// Lengths of blocks: one for all of them, restarting in each document, or each block's own.
  blocks(name, documents, otherwise) {
    const given = this.integers(name), total = sum(documents);
    if (given.length && !(given.length === 1 && given[0] !== total)) return this.lengths(name, total);
    const length = this.integer(name, otherwise);
    need(length >= 1, `${name} is ${length}; a block must have at least 1 token`);
    return cutEach(documents, length);
  }

  drawLengths(count, total = this.seqlen) {
    const cuts = [0, total];
    for (let n = 1; n < Math.min(count, total); ++n) cuts.push(this.random.integer(1, total - 1));
    cuts.sort((a, b) => a - b);
    return cuts.map((cut, n) => cut - cuts[n - 1]).filter((length) => length > 0);
  }

  choose(name, value) {
    this.chosen[name] = String(value);
    return value;
  }
}

// --- Families: a mask is {rows, keys, lo, hi, lts, lte, uts, ute}: row i sees key j only if lo <= j - i <= hi; a
// vector may be left out.

function square(seqlen, parts) {
  return {rows: seqlen, keys: seqlen, lo: -Infinity, hi: Infinity, ...parts};
}

/// value(begin, end, j, n) of every key j, which lies in piece n of the sequence, [begin, end).
function eachKey(lengths, value) {
  const values = [];
  let begin = 0;
  lengths.forEach((length, n) => {
    for (let j = begin; j < begin + length; ++j) values.push(value(begin, begin + length, j, n));
    begin += length;
  });
  return values;
}

function range(count, value) {
  return Array.from({length: count}, (_, n) => value(n));
}

const families = {
  full: (p) => square(p.seqlen),

  causal: (p) => square(p.seqlen, {hi: p.integer("q_offset", 0)}),

  sliding_window(p) {
    const left = p.integer("left", Math.max(Math.floor(p.seqlen / 16) - 1, 0)), right = p.integer("right", 0);
    need(left >= -1 && right >= -1, "left and right must be at least 0, or -1 for all");
    return square(p.seqlen, {lo: left < 0 ? -Infinity : -left, hi: right < 0 ? Infinity : right});
  },

  causal_document: (p) => square(p.seqlen, {hi: 0, lts: eachKey(p.lengths("lengths"), (begin, end) => end)}),

  document(p) {
    const lengths = p.lengths("lengths");
    return square(p.seqlen, {lts: eachKey(lengths, (begin, end) => end), ute: eachKey(lengths, (begin) => begin)});
  },

  shared_question(p) {
    const groups = p.lengths("groups"), given = p.integers("answers"), counts = [], lengths = [], ends = [];
    let begin = 0;
    need(given.length <= groups.length, `answers has ${given.length} counts; there are ${groups.length} groups`);
    groups.forEach((group, g) => {
      const count = given.length ? given[g % given.length] : p.random.integer(2, 6);
      need(count >= 0 && (!given.length || count <= group),
        `answers has ${count}; it must be between 0 and the group's length, ${group}`);
      // An answer has 10 to 20 % of the question's length.
      const shares = range(Math.min(count, group), () => 0.1 + 0.1 * p.random.real());
      const whole = shares.reduce((a, b) => a + b, 1);
      let question = group;
      const answers = shares.map((share) => {
        const answer = Math.min(question, Math.max(1, Math.floor((group * share) / whole)));
        question -= answer;
        return answer;
      });
      counts.push(count);
      lengths.push(question, ...answers);
      // The question is seen to the end of the group; an answer to its own.
      ends.push(begin + group, ...answers.map(() => 0));
      begin += group;
    });
    if (!given.length) p.choose("answers", counts);
    return square(p.seqlen, {hi: 0, lts: eachKey(lengths, (from, to, j, n) => ends[n] || to)});
  },

  global_sliding_window(p) {
    const seqlen = p.seqlen, global = p.integer("global", Math.min(16, Math.floor(seqlen / 4)));
    const reach = p.integer("window", Math.floor(seqlen / 16));
    need(global >= 0 && reach >= 0, "global and window must be at least 0");
    const first = Math.min(global, seqlen);
    return square(seqlen, {
      lts: range(seqlen, (j) => (j < first ? seqlen : Math.min(j + reach + 1, seqlen))),
      uts: range(seqlen, () => first),
      ute: range(seqlen, (j) => (j < first ? first : Math.max(j - reach, first))),
    });
  },

  causal_blockwise(p) {
    const lengths = p.lengths("lengths"), last = lengths.length - 1, test = p.seqlen - (lengths[last] ?? 0);
    return square(p.seqlen, {
      hi: 0,
      lts: eachKey(lengths, (begin, end) => end),
      lte: eachKey(lengths, (begin, end, j, n) => (n === last ? p.seqlen : test)),
    });
  },

  prefix_lm_causal(p) {
    const prefix = p.integer("prefix", Math.floor(p.seqlen / 2));
    need(prefix >= 0 && prefix <= p.seqlen, `prefix is ${prefix}; it must be between 0 and ${p.seqlen}`);
    return square(p.seqlen, {ute: range(p.seqlen, (j) => (j < prefix ? 0 : j))});
  },

  prefix_lm_document(p) {
    const lengths = p.lengths("lengths");
    let prefix = p.integers("prefix");
    if (!prefix.length)
      prefix = p.choose("prefix", lengths.map((length) => Math.floor(length * (0.1 + 0.4 * p.random.real()))));
    need(prefix.length === lengths.length,
      `prefix has ${prefix.length} entries; it needs one for each of the ${lengths.length} documents`);
    need(prefix.every((own, n) => own >= 0 && own <= lengths[n]),
      "a prefix must be between 0 and its document's length");
    return square(p.seqlen, {
      lts: eachKey(lengths, (begin, end) => end),
      ute: eachKey(lengths, (begin, end, j, n) => (j < begin + prefix[n] ? begin : j)),
    });
  },

  qk_sparse(p) {
    const seqlen = p.seqlen, scaled = (at) => Math.floor((at * seqlen) / 8192);
    let bounds = p.integers("spans");
    if (!bounds.length) bounds = p.choose("spans", [1024, 1562, 2358, 4058].map(scaled));
    needSpans("spans", bounds, seqlen);
    const lts = range(seqlen, () => seqlen), lte = range(seqlen, () => seqlen);
    for (let n = 0; n < bounds.length; n += 2) {
      for (let j = bounds[n]; j < bounds[n + 1]; ++j) [lts[j], lte[j]] = [j, bounds[n + 1]];
    }
    return square(seqlen, {hi: 0, lts, lte});
  },

  hash_sparse(p) {
    const [givenQueries, givenKeys] = [p.integers("query_buckets"), p.integers("key_buckets")];
    const buckets = p.integer("buckets", 8);
    need(buckets >= 1, `buckets is ${buckets}; it must be at least 1`);
    const draw = () => range(p.seqlen, () => p.random.integer(0, buckets - 1)).sort((a, b) => a - b);
    const queries = givenQueries.length ? givenQueries : p.choose("query_buckets", draw());
    const keys = givenKeys.length ? givenKeys : p.choose("key_buckets", draw());
    need(queries.length === p.seqlen && keys.length === p.seqlen,
      `query_buckets and key_buckets need ${p.seqlen} entries each`);
    return hashSparse(queries, keys, p.integer("causal", 1) !== 0);
  },

  random_eviction(p) {
    const given = p.text("seed");
    need(!given.includes(","), "seed takes one integer");
    const random = new Random(
      BigInt.asUintN(64, given ? BigInt(given) : p.choose("seed", p.random.next() % (1n << 63n))));
    const lts = range(p.seqlen, () => p.seqlen), present = [];
    for (let i = 0; i < p.seqlen; ++i) {
      if (i >= Math.floor(p.seqlen / 2) && present.length) {
        const victim = random.integer(0, present.length - 1);
        lts[present[victim]] = i;
        present[victim] = present[present.length - 1];
        present.pop();
      }
      present.push(i);
    }
    return square(p.seqlen, {hi: 0, lts});
  },

  eviction(p) {
    const given = p.integers("evicted_at");
    const lts = given.length ? given
      : p.choose("evicted_at", range(p.seqlen, (j) => p.random.integer(j + 1, p.seqlen)));
    need(lts.length === p.seqlen, `evicted_at has ${lts.length} entries; it needs ${p.seqlen}`);
    return square(p.seqlen, {hi: 0, lts});
  },

  prefix_tree(p) {
    let parents = p.integers("parents");
    if (!parents.length) parents = p.choose("parents", drawTree(p));
    let lengths = p.integers("lengths");
    const share = (n) => Math.floor((p.seqlen * n) / parents.length);
    lengths = lengths.length ? p.lengths("lengths")
      : p.choose("lengths", parents.map((_, n) => share(n + 1) - share(n)));
    need(lengths.length === parents.length,
      `lengths has ${lengths.length} entries; it needs one for each of the ${parents.length} nodes`);
    const ends = subtreeEnds(parents, lengths);
    return square(p.seqlen, {hi: 0, lts: eachKey(lengths, (begin, end, j, n) => ends[n])});
  },

  padding(p) {
    const given = p.integers("key_lengths"), givenQueries = p.integers("query_lengths");
    const keys = given.length ? given
      : p.choose("key_lengths", [p.random.integer(Math.floor((p.seqlen + 1) / 2), p.seqlen)]);
    const all = given.length ? keys.map(() => p.seqlen) : keys;
    const queries = givenQueries.length ? givenQueries : p.choose("query_lengths", all);
    need(queries.length === keys.length,
      `query_lengths has ${queries.length} entries and key_lengths ${keys.length}; they must be equal`);
    need([...keys, ...queries].every((n) => n >= 0 && n <= p.seqlen), `a length must be between 0 and ${p.seqlen}`);
    need(p.entry < keys.length, `batch entry ${p.entry} is shown, and there are ${keys.length}, counted from 0`);
    return square(p.seqlen, {lts: range(p.seqlen, (j) => (j < keys[p.entry] ? queries[p.entry] : 0))});
  },

  attention_sink_window(p) {
    const lengths = p.documents("lengths"), sink = p.integer("sink", 4);
    const reach = windowOf(p, Math.max(Math.floor(p.seqlen / 16), 1));
    need(sink >= 0, `sink is ${sink}; it must be at least 0`);
    const lts = eachKey(lengths, (begin, end, j) => (j - begin < sink ? end : Math.min(j + reach, end)));
    return square(p.seqlen, {hi: 0, lts});
  },

  block_causal(p) {
    const documents = p.documents("lengths"), reach = windowOf(p, -1);
    const blocks = p.blocks("blocks", documents, Math.max(Math.floor(p.seqlen / 8), 1));
    const ends = eachKey(documents, (begin, end) => end), begins = eachKey(documents, (begin) => begin);
    const blockBegins = [];
    blocks.reduce((begin, own, n) => (blockBegins[n] = begin) + own, 0);
    return square(p.seqlen, {
      lts: eachKey(blocks, (begin, end, j, n) => Math.min(blockBegins[n + reach] ?? p.seqlen, ends[j])),
      ute: eachKey(blocks, (begin, end, j) => Math.max(begin, begins[j])),
    });
  },

  causal_with_blocks(p) {
    const seqlen = p.seqlen, documents = p.documents("lengths"), given = p.integers("blocks");
    const bounds = given.length ? given : p.choose("blocks", drawBlocks(p, documents)), reach = windowOf(p, -1);
    needSpans("blocks", bounds, seqlen);
    const documentEnds = eachKey(documents, (begin, end) => end);
    const begins = range(seqlen, (j) => j), ends = range(seqlen, (j) => j + 1);
    for (let n = 0; n < bounds.length; n += 2) {
      const [begin, end] = [bounds[n], bounds[n + 1]];
      need(begin === end || end <= documentEnds[begin], `the block from ${begin} to ${end} must lie in one document`);
      begins.fill(begin, begin, end);
      ends.fill(end, begin, end);
    }
    const lts = ends.map((end, j) => Math.max(end, Math.min(j + reach, documentEnds[j])));
    return square(seqlen, {lts, ute: begins});
  },

  block_diffusion(p) {
    const text = Math.floor(p.seqlen / 2), documents = p.documents("lengths", text);
    const blocks = p.blocks("blocks", documents, Math.max(Math.floor(text / 8), 1));
    const documentEnds = eachKey(documents, (begin, end) => end), begins = eachKey(documents, (begin) => begin);
    const own = eachKey(blocks, (begin, end, j) => [Math.max(begin, begins[j]), Math.min(end, documentEnds[j])]);
    if (p.integer("concatenated", 0) !== 0) return concatenatedDiffusion(p.seqlen, own, documentEnds);
    const seen = [];
    own.forEach(([begin, end], j) => {
      seen[begin + j] = [2 * begin, begin + end];
      seen[end + j] = [begin + end, 2 * documentEnds[j]];
    });
    return seenInSquare(p.seqlen, 0, seen);
  },

  eagle3_ttt(p) {
    const steps = p.positive("steps", 4), text = Math.floor(p.seqlen / steps);
    const later = range(Math.max(steps - 1, 0) * text, (n) => [n % text, (n % text) + 1]);
    const first = eachKey(p.documents("lengths", text), (begin, end, j) => [j, end]);
    return seenInSquare(p.seqlen, (steps - 1) * text, [...first, ...later]);
  },

  dflash(p) {
    const seqlen = p.seqlen, block = p.positive("block", Math.min(Math.max(Math.floor(seqlen / 16), 1), 16));
    const given = p.integers("anchors");
    need(given.length <= Math.floor(seqlen / block),
      `anchors has ${given.length} entries; there is room for ${Math.floor(seqlen / block)}`);
    const blocks = given.length || Math.floor(Math.floor(seqlen / 2) / block), context = seqlen - blocks * block;
    const draw = () => range(blocks, () => p.random.integer(0, context - 1)).sort((a, b) => a - b);
    const anchors = given.length ? given : p.choose("anchors", draw());
    need([0, ...anchors, context].every((at, n, all) => n === 0 || all[n - 1] <= at),
      `anchors must ascend within 0 and ${context}`);
    // Blocks anchored before each position; the position after the context belongs to the last document.
    const before = new Array(context + 2).fill(0);
    for (const anchor of anchors) ++before[anchor + 1];
    for (let n = 1; n < before.length; ++n) before[n] += before[n - 1];
    const last = (end) => (end === context ? blocks : before[end]);
    const ofContext = eachKey(p.documents("lengths", context),
      (begin, end, j) => [block * before[j + 1], block * last(end)]);
    const ofBlocks = range(blocks * block, (n) => [n - (n % block), n - (n % block) + block]);
    return seenInSquare(seqlen, context, [...ofContext, ...ofBlocks]);
  },
};

/// The noisy copy of everything, then the clean one. `own` is the block of each token, `ends` where its document ends.
function concatenatedDiffusion(seqlen, own, ends) {
  need(seqlen % 2 === 0, `seqlen is ${seqlen}; with concatenated it must be even`);
  const text = own.length, hidden = own.map(([begin, end]) => [0, begin, end, seqlen]);
  own.forEach(([begin, end], j) => {
    const isLast = end === ends[j];
    need(isLast || ends[j] === text, `column ${text + j} needs 3 intervals; the interleaved order fits every packing`);
    hidden.push(isLast ? [0, text + begin, text + end, seqlen] : [0, end, text, text + begin]);
  });
  const vector = (n) => hidden.map((bounds) => bounds[n]);
  return square(seqlen, {uts: vector(0), ute: vector(1), lts: vector(2), lte: vector(3)});
}

/// The rows, counted from `first`, that see each key alone; keys that are left see and are seen by nothing.
function seenInSquare(seqlen, first, seen) {
  const shifted = (at) => range(seqlen, (j) => (j < seen.length ? seen[j][at] + first : 0));
  return square(seqlen, {lts: shifted(1), ute: shifted(0)});
}

/// Each of the lengths, cut into pieces of this length, the last being shorter if need be.
function cutEach(lengths, piece) {
  return lengths.flatMap((length) => range(Math.ceil(length / piece), (n) => Math.min(piece, length - n * piece)));
}

function needSpans(name, bounds, seqlen) {
  need(bounds.length % 2 === 0, `${name} has ${bounds.length} integers; it needs begin,end pairs`);
  need([0, ...bounds, seqlen].every((at, n, all) => n === 0 || all[n - 1] <= at),
    `${name} must ascend within 0 and ${seqlen}`);
}

/// Each document in pieces of text and, every second one, a block; begins and ends in a row.
function drawBlocks(p, documents) {
  let begin = 0;
  return documents.flatMap((length) => {
    let at = begin;
    begin += length;
    return p.drawLengths(p.random.integer(3, 7), length)
      .flatMap((piece, n) => ((at += piece), n % 2 ? [at - piece, at] : []));
  });
}

/// How far the window reaches, -1 being everything.
function windowOf(p, otherwise) {
  const window = p.integer("window", otherwise);
  need(window >= 1 || window === -1, `window is ${window}; it must be at least 1, or -1 for all`);
  return window < 0 ? Infinity : window;
}

/// i and j in the same bucket and, if causal, j <= i. An error where a key is hidden from more than two runs of rows.
function hashSparse(queries, keys, causal) {
  const rows = queries.length, seenFrom = new Map();  // bucket -> runs of rows
  queries.forEach((bucket, i) => {
    const runs = seenFrom.get(bucket) ?? seenFrom.set(bucket, []).get(bucket);
    if (runs.length && runs[runs.length - 1][1] === i) ++runs[runs.length - 1][1];
    else runs.push([i, i + 1]);
  });
  const [lts, lte, uts, ute] = range(4, () => []);
  keys.forEach((bucket, j) => {
    const hidden = complement([[0, causal ? j : 0], ...(seenFrom.get(bucket) ?? [])], rows);
    need(hidden.length <= 2, `column ${j} needs ${hidden.length} intervals; sort the queries by bucket`);
    const [[a, b], [c, d]] = [hidden[0] ?? [0, 0], hidden[1] ?? [0, 0]];
    lts.push(a), lte.push(b), uts.push(c), ute.push(d);
  });
  return {rows, keys: keys.length, lo: -Infinity, hi: causal ? 0 : Infinity, lts, lte, uts, ute};
}

/// A child of the node before it or of one of that node's ancestors; up to two roots.
function drawTree(p) {
  const nodes = p.drawLengths(p.random.integer(4, 12)).length, parents = [];
  let path = [];
  for (let n = 0; n < nodes; ++n) {
    const up = path.length ? p.random.integer(n === Math.floor(nodes / 2) ? 0 : 1, path.length) : 0;
    path = path.slice(0, up);
    parents.push(path.length ? path[path.length - 1] : -1);
    path.push(n);
  }
  return parents;
}

/// For each node of a tree in depth-first order, where its subtree ends.
function subtreeEnds(parents, lengths) {
  const ends = new Array(parents.length), path = [];
  let tokens = 0;
  const leave = (parent) => {
    while (path.length && path[path.length - 1] !== parent) ends[path.pop()] = tokens;
  };
  parents.forEach((parent, n) => {
    leave(parent);
    need(parent === -1 || path.length, `node ${n} with parent ${parent} breaks the depth-first order`);
    tokens += lengths[n];
    path.push(n);
  });
  leave(-1);
  return ends;
}

/// A mask as the library writes it in JSON.
function maskFromJson(json) {
  const {lts, lte, uts, ute, band, q_offset: offset} = json;
  const edge = (value, otherwise) => (value === null ? otherwise : value + offset);
  return {rows: json.seqlen_q, keys: json.seqlen_k, lo: edge(band.lo, -Infinity), hi: edge(band.hi, Infinity),
    lts, lte, uts, ute};
}
