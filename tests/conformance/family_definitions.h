// SPDX-License-Identifier: Apache-2.0
#pragma once

// Predicates of the families, written from their definitions in builders.h: the (row, key) of the square mask that
// are visible under given parameters. Nothing here looks at intervals.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "common/random.h"
#include "families/families.h"

namespace flashmask::test {

using Predicate = std::function<bool(int64_t i, int64_t j)>;

inline std::vector<int64_t> numbers(const FamilyParameters& parameters, const std::string& name) {
  std::vector<int64_t> values;
  const auto found = parameters.find(name);
  if (found == parameters.end()) return values;
  std::istringstream text(found->second);
  for (std::string part; std::getline(text, part, ',');) values.push_back(std::stoll(part));
  return values;
}

/// For each token, the number of the piece it lies in.
inline std::vector<int64_t> token_pieces(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> piece;
  for (std::size_t n = 0; n < lengths.size(); ++n)
    piece.insert(piece.end(), static_cast<std::size_t>(lengths[n]), static_cast<int64_t>(n));
  return piece;
}

inline bool is_ancestor_or_self(const std::vector<int64_t>& parents, int64_t ancestor, int64_t node) {
  for (; node >= 0; node = parents[static_cast<std::size_t>(node)]) {
    if (node == ancestor) return true;
  }
  return false;
}

inline Predicate shared_question_definition(const FamilyParameters& p) {
  // (group, answer) of each token, answer 0 being the question.
  std::vector<std::pair<int64_t, int64_t>> place;
  const auto groups = numbers(p, "groups"), counts = numbers(p, "answers"), answers = numbers(p, "answer_lengths");
  std::size_t next = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    std::vector<std::pair<int64_t, int64_t>> of_answers;
    for (int64_t a = 1; a <= counts[g]; ++a)
      of_answers.insert(of_answers.end(), static_cast<std::size_t>(answers[next++]), {static_cast<int64_t>(g), a});
    place.insert(place.end(), static_cast<std::size_t>(groups[g]) - of_answers.size(), {static_cast<int64_t>(g), 0});
    place.insert(place.end(), of_answers.begin(), of_answers.end());
  }
  return [place](int64_t i, int64_t j) {
    const auto [row_group, row_answer] = place[static_cast<std::size_t>(i)];
    const auto [key_group, key_answer] = place[static_cast<std::size_t>(j)];
    return j <= i && row_group == key_group && (key_answer == 0 || key_answer == row_answer);
  };
}

inline Predicate prefix_lm_document_definition(const FamilyParameters& p) {
  const auto lengths = numbers(p, "lengths"), prefixes = numbers(p, "prefix");
  const auto document = token_pieces(lengths);
  std::vector<bool> in_prefix;
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    for (int64_t t = 0; t < lengths[n]; ++t) in_prefix.push_back(t < prefixes[n]);
  }
  return [document, in_prefix](int64_t i, int64_t j) {
    const auto row = static_cast<std::size_t>(i), key = static_cast<std::size_t>(j);
    return document[row] == document[key] && (j <= i || in_prefix[key]);
  };
}

inline Predicate attention_sink_window_definition(const FamilyParameters& p) {
  const auto lengths = numbers(p, "lengths");
  std::vector<bool> is_sink;
  for (const int64_t length : lengths) {
    for (int64_t t = 0; t < length; ++t) is_sink.push_back(t < numbers(p, "sink").at(0));
  }
  return [document = token_pieces(lengths), is_sink, window = numbers(p, "window").at(0)](int64_t i, int64_t j) {
    const auto row = static_cast<std::size_t>(i), key = static_cast<std::size_t>(j);
    return document[row] == document[key] && j <= i && (window == -1 || i - j < window || is_sink[key]);
  };
}

inline Predicate causal_with_blocks_definition(const FamilyParameters& p) {
  const auto document = token_pieces(numbers(p, "lengths")), bounds = numbers(p, "blocks");
  std::vector<int64_t> block(document.size(), -1);  // each token's block, -1 for text
  for (std::size_t n = 0; n < bounds.size(); n += 2) {
    for (int64_t t = bounds[n]; t < bounds[n + 1]; ++t) block[static_cast<std::size_t>(t)] = static_cast<int64_t>(n);
  }
  return [document, block, window = numbers(p, "window").at(0)](int64_t i, int64_t j) {
    const auto row = static_cast<std::size_t>(i), key = static_cast<std::size_t>(j);
    const bool before = j <= i && (window == -1 || i - j < window);
    return document[row] == document[key] && (before || (block[row] >= 0 && block[row] == block[key]));
  };
}

inline Predicate block_diffusion_definition(const FamilyParameters& p) {
  const auto document = token_pieces(numbers(p, "lengths")), block = token_pieces(numbers(p, "blocks"));
  struct Token {
    int64_t document, block;
    bool noisy;
  };
  // A block's part of each document is laid out on its own, the noisy copy first.
  std::vector<Token> tokens;
  for (std::size_t begin = 0, end; begin < document.size(); begin = end) {
    for (end = begin; end < document.size() && document[end] == document[begin] && block[end] == block[begin];) ++end;
    for (const bool noisy : {true, false})
      tokens.insert(tokens.end(), end - begin, {document[begin], block[begin], noisy});
  }
  const auto concatenated = numbers(p, "concatenated");
  if (!concatenated.empty() && concatenated[0] != 0)
    std::stable_partition(tokens.begin(), tokens.end(), [](const Token& token) { return token.noisy; });
  return [tokens](int64_t row, int64_t key) {
    const auto last = static_cast<int64_t>(tokens.size());
    if (row >= last || key >= last) return false;
    const Token i = tokens[static_cast<std::size_t>(row)], j = tokens[static_cast<std::size_t>(key)];
    if (i.document != j.document) return false;
    if (j.noisy) return i.noisy && i.block == j.block;
    return i.noisy ? j.block < i.block : j.block <= i.block;
  };
}

inline Predicate eagle3_ttt_definition(const FamilyParameters& p) {
  return [document = token_pieces(numbers(p, "lengths")), steps = numbers(p, "steps").at(0)](int64_t row, int64_t key) {
    const auto total = static_cast<int64_t>(document.size());
    if (total == 0 || row / total != steps - 1 || key >= steps * total) return false;
    const auto i = static_cast<std::size_t>(row % total), j = static_cast<std::size_t>(key % total);
    return key < total ? document[i] == document[j] && j <= i : i == j;
  };
}

inline Predicate dflash_definition(const FamilyParameters& p) {
  return [document = token_pieces(numbers(p, "lengths")), anchors = numbers(p, "anchors"),
          block = numbers(p, "block").at(0)](int64_t row, int64_t key) {
    const auto context = static_cast<int64_t>(document.size()), blocks = static_cast<int64_t>(anchors.size());
    const int64_t of_row = (row - context) / block, last = context + blocks * block;
    if (row < context || row >= last || key >= last) return false;
    if (key >= context) return (key - context) / block == of_row;
    const int64_t anchor = anchors[static_cast<std::size_t>(of_row)];
    if (key >= anchor) return false;
    const int64_t own = anchor == context ? document.back() : document[static_cast<std::size_t>(anchor)];
    return document[static_cast<std::size_t>(key)] == own;
  };
}

/// True if `key` is among the `kernel` places around `place`, every dilation-th, of a line of `length` of them.
inline bool is_neighbour(int64_t place, int64_t key, int64_t length, int64_t kernel, int64_t dilation) {
  int64_t begin = place - kernel / 2 * dilation;
  while (begin < 0) begin += dilation;
  while (begin + (kernel - 1) * dilation >= length) begin -= dilation;
  return key >= begin && key <= begin + (kernel - 1) * dilation && (key - begin) % dilation == 0;
}

inline Predicate bigbird_definition(const FamilyParameters& p, int64_t seqlen) {
  const auto one = [&](const std::string& name) { return numbers(p, name).at(0); };
  const int64_t block = one("block"), blocks = (seqlen + block - 1) / block, global = one("global_blocks");
  std::vector<std::vector<bool>> sees;
  Random random(static_cast<uint64_t>(one("seed")));
  for (int64_t b = 0; b < blocks; ++b) {
    std::vector<bool> seen;
    std::vector<std::size_t> others;
    for (int64_t c = 0; c < blocks; ++c) {
      seen.push_back(b < global || c < global || std::abs(b - c) <= one("window"));
      if (!seen.back()) others.push_back(static_cast<std::size_t>(c));
    }
    // Floyd's draw, by the blocks' places among the others.
    const auto count = std::ssize(others);
    for (int64_t last = std::max<int64_t>(count - one("random_blocks"), 0); last < count; ++last) {
      const auto drawn = others[static_cast<std::size_t>(random.integer(0, last))];
      seen[seen[drawn] ? others[static_cast<std::size_t>(last)] : drawn] = true;
    }
    sees.push_back(seen);
  }
  return [sees, block](int64_t i, int64_t j) {
    return sees[static_cast<std::size_t>(i / block)][static_cast<std::size_t>(j / block)];
  };
}

/// The definition of `family` of these parameters at a length; empty for one whose draw its parameters do not tell.
inline Predicate family_definition(const std::string& family, const FamilyParameters& p, int64_t seqlen) {
  const auto one = [&](const std::string& name) { return numbers(p, name).at(0); };
  if (family == "full" || family == "none") return [](int64_t, int64_t) { return true; };
  if (family == "causal") return [offset = one("q_offset")](int64_t i, int64_t j) { return j <= i + offset; };
  if (family == "sliding_window") {
    return [left = one("left"), right = one("right")](int64_t i, int64_t j) {
      return (left < 0 || i - left <= j) && (right < 0 || j <= i + right);
    };
  }
  if (family == "causal_document" || family == "document") {
    return
        [document = token_pieces(numbers(p, "lengths")), causal = family == "causal_document"](int64_t i, int64_t j) {
          return document[static_cast<std::size_t>(i)] == document[static_cast<std::size_t>(j)] && (!causal || j <= i);
        };
  }
  if (family == "shared_question") return shared_question_definition(p);
  if (family == "global_sliding_window") {
    return [global = one("global"), window = one("window")](int64_t i, int64_t j) {
      return i < global || j < global || (i - j <= window && j - i <= window);
    };
  }
  if (family == "causal_blockwise") {
    const auto lengths = numbers(p, "lengths");
    return [block = token_pieces(lengths), last = static_cast<int64_t>(lengths.size()) - 1](int64_t i, int64_t j) {
      const int64_t of_row = block[static_cast<std::size_t>(i)];
      return j <= i && (of_row == block[static_cast<std::size_t>(j)] || of_row == last);
    };
  }
  if (family == "prefix_lm_causal")
    return [prefix = one("prefix")](int64_t i, int64_t j) { return j <= i || j < prefix; };
  if (family == "prefix_lm_document") return prefix_lm_document_definition(p);
  if (family == "qk_sparse") {
    return [spans = numbers(p, "spans")](int64_t i, int64_t j) {
      for (std::size_t n = 0; n < spans.size(); n += 2) {
        if (spans[n] <= j && j < spans[n + 1] && j <= i && i < spans[n + 1]) return false;
      }
      return j <= i;
    };
  }
  if (family == "hash_sparse") {
    return [rows = numbers(p, "query_buckets"), keys = numbers(p, "key_buckets"), causal = one("causal") != 0](
               int64_t i, int64_t j) {
      return rows[static_cast<std::size_t>(i)] == keys[static_cast<std::size_t>(j)] && (!causal || j <= i);
    };
  }
  if (family == "eviction")
    return
        [at = numbers(p, "evicted_at")](int64_t i, int64_t j) { return j <= i && i < at[static_cast<std::size_t>(j)]; };
  if (family == "prefix_tree") {
    return [parents = numbers(p, "parents"), node = token_pieces(numbers(p, "lengths"))](int64_t i, int64_t j) {
      return j <= i &&
             is_ancestor_or_self(parents, node[static_cast<std::size_t>(j)], node[static_cast<std::size_t>(i)]);
    };
  }
  if (family == "padding") {
    return
        [keys = one("key_lengths"), rows = one("query_lengths")](int64_t i, int64_t j) { return i < rows && j < keys; };
  }
  if (family == "attention_sink_window") return attention_sink_window_definition(p);
  if (family == "block_causal") {
    return [document = token_pieces(numbers(p, "lengths")), block = token_pieces(numbers(p, "blocks")),
            window = one("window")](int64_t i, int64_t j) {
      const auto row = static_cast<std::size_t>(i), key = static_cast<std::size_t>(j);
      const int64_t back = block[row] - block[key];
      return document[row] == document[key] && back >= 0 && (window == -1 || back < window);
    };
  }
  if (family == "causal_with_blocks") return causal_with_blocks_definition(p);
  if (family == "block_diffusion") return block_diffusion_definition(p);
  if (family == "eagle3_ttt") return eagle3_ttt_definition(p);
  if (family == "dflash") return dflash_definition(p);
  if (family == "dilated_window") {
    std::vector<int64_t> token(static_cast<std::size_t>(seqlen));
    std::iota(token.begin(), token.end(), 0);
    const int64_t window = one("window"), dilation = one("dilation");
    std::stable_sort(token.begin(), token.end(), [=](int64_t a, int64_t b) { return a % dilation < b % dilation; });
    return [=](int64_t row, int64_t key) {
      const int64_t back = token[static_cast<std::size_t>(row)] - token[static_cast<std::size_t>(key)];
      return back >= 0 && back % dilation == 0 && (window == -1 || back < window * dilation);
    };
  }
  if (family == "bigbird") return bigbird_definition(p, seqlen);
  if (family == "dilated") {
    return [window = one("window"), dilation = one("dilation"), causal = one("causal") != 0](int64_t i, int64_t j) {
      const int64_t apart = std::abs(i - j);
      return apart % dilation == 0 && (window == -1 || apart / dilation < window) && (!causal || j <= i);
    };
  }
  if (family == "neighborhood_2d" && seqlen > 0) {
    return [height = one("height"), width = seqlen / one("height"), rows = one("kernel_height"),
            columns = one("kernel_width"), dilation = one("dilation")](int64_t i, int64_t j) {
      return is_neighbour(i / width, j / width, height, rows, dilation) &&
             is_neighbour(i % width, j % width, width, columns, dilation);
    };
  }
  return {};
}

}  // namespace flashmask::test
