// SPDX-License-Identifier: Apache-2.0

// The oracle: loops over a dense boolean matrix in float64, one element at a time, too simple to be wrong.

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "backends/reference/cached_reference.h"
#include "backends/reference/score.h"
#include "call/alibi.h"
#include "call/backend.h"
#include "call/sink_and_dropout.h"
#include "common/element.h"

namespace flashmask {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

int64_t element(const TensorView& t, int64_t b, int64_t s, int64_t h, int64_t c) {
  return b * t.stride[0] + s * t.stride[1] + h * t.stride[2] + c * t.stride[3];
}

/// One head of a tensor [batch, seqlen, heads, dim] as float64, row-major.
std::vector<double> load_head(const TensorView& t, int64_t b, int64_t h) {
  std::vector<double> head;
  head.reserve(static_cast<std::size_t>(t.shape[1] * t.shape[3]));
  for (int64_t s = 0; s < t.shape[1]; ++s) {
    for (int64_t c = 0; c < t.shape[3]; ++c) head.push_back(load_element(t, element(t, b, s, h, c)));
  }
  return head;
}

void store_head(const TensorView& t, int64_t b, int64_t h, const std::vector<double>& head) {
  std::size_t at = 0;
  for (int64_t s = 0; s < t.shape[1]; ++s) {
    for (int64_t c = 0; c < t.shape[3]; ++c) store_element(t, element(t, b, s, h, c), head[at++]);
  }
}

double dot(const double* x, const double* y, int64_t n) {
  double sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += x[c] * y[c];
  return sum;
}

/// y += factor * x
void add_scaled(double factor, const double* x, double* y, int64_t n) {
  for (int64_t c = 0; c < n; ++c) y[c] += factor * x[c];
}

/// visible[i * seqlen_k + j] for batch entry b and query head h.
std::vector<uint8_t> visible_matrix(const Problem& p, int64_t b, int64_t h) {
  std::vector<uint8_t> visible;
  visible.reserve(static_cast<std::size_t>(p.seqlen_q * p.seqlen_k));
  const int64_t mask_batch = broadcast_index(b, p.batch, p.mask.batch()),
                mask_head = broadcast_index(h, p.heads_q, p.mask.heads());
  const uint8_t* dense = p.dense.defined() ? dense_matrix(p, b, h) : nullptr;
  for (int64_t i = 0; i < p.seqlen_q; ++i) {
    for (int64_t j = 0; j < p.seqlen_k; ++j) {
      visible.push_back(dense ? dense[i * p.dense.stride[2] + j * p.dense.stride[3]] != 0
                              : is_visible(p.mask, mask_batch, mask_head, i, j));
    }
  }
  return visible;
}

/// One past the last row of batch entry b that sees a key under some head: dout past it counts as zero.
int64_t visible_rows(const Problem& p, int64_t b) {
  if (p.dense.defined()) return p.seqlen_q;
  int64_t end = 0;
  for (int64_t h = 0; h < p.heads_q; ++h) {
    const std::vector<uint8_t> visible = visible_matrix(p, b, h);
    const auto last = std::find_if(visible.rbegin(), visible.rend(), [](uint8_t sees) { return sees != 0; });
    if (last != visible.rend()) end = std::max(end, (visible.rend() - last - 1) / p.seqlen_k + 1);
  }
  return end;
}

reference::Score score_of(const Problem& p, const double* q, const double* k, double bias) {
  return reference::score_of(p, dot(q, k, p.head_dim), bias);
}

void forward(const Problem& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads_q; ++h) {
      const std::vector<double> q = load_head(p.q, b, h), k = load_head(p.k, b, p.kv_head(h)),
                                v = load_head(p.v, b, p.kv_head(h));
      const std::vector<uint8_t> visible = visible_matrix(p, b, h);
      const double sink = sink_of(p, h);
      const bool has_sink = sink != -kInfinity;
      const DropoutSource dropout(p.features.dropout, b, h);
      const Alibi alibi(p, b, h);
      std::vector<double> out(static_cast<std::size_t>(p.seqlen_q * p.head_dim_v), 0.0),
          score(static_cast<std::size_t>(p.seqlen_k));
      for (int64_t i = 0; i < p.seqlen_q; ++i) {
        double largest = sink, sum = 0;
        bool sees = has_sink;
        for (int64_t j = 0; j < p.seqlen_k; ++j) {
          if (!visible[i * p.seqlen_k + j]) continue;
          sees = true;
          score[j] = score_of(p, &q[i * p.head_dim], &k[j * p.head_dim], alibi.bias(i, j)).value;
          largest = std::fmax(largest, score[j]);
        }
        if (has_sink) sum += std::exp(sink - largest);
        for (int64_t j = 0; j < p.seqlen_k; ++j) {
          if (visible[i * p.seqlen_k + j]) sum += std::exp(score[j] - largest);
        }
        for (int64_t j = 0; j < p.seqlen_k; ++j) {
          if (visible[i * p.seqlen_k + j] && dropout.keeps(i, j))
            add_scaled(dropout.scale() * std::exp(score[j] - largest) / sum, &v[j * p.head_dim_v],
                       &out[i * p.head_dim_v], p.head_dim_v);
        }
        store_element(p.lse, lse_offset(p.lse, b, h, i), sees ? largest + std::log(sum) : -kInfinity);
      }
      store_head(p.out, b, h, out);
    }
  }
}

void backward(const Problem& p) {
  std::vector<double> dsink(static_cast<std::size_t>(p.heads_q), 0.0);
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t row_end = visible_rows(p, b);
    for (int64_t hk = 0; hk < p.heads_kv; ++hk) {
      const std::vector<double> k = load_head(p.k, b, hk), v = load_head(p.v, b, hk);
      std::vector<double> dk(k.size(), 0.0), dv(v.size(), 0.0);
      for (int64_t h = hk * p.group_size(); h < (hk + 1) * p.group_size(); ++h) {
        const std::vector<double> q = load_head(p.q, b, h), out = load_head(p.out, b, h),
                                  dout = load_head(p.dout, b, h);
        const double sink = sink_of(p, h);
        const DropoutSource dropout(p.features.dropout, b, h);
        const Alibi alibi(p, b, h);
        const std::vector<uint8_t> visible = visible_matrix(p, b, h);
        std::vector<double> dq(q.size(), 0.0);
        for (int64_t i = 0; i < p.seqlen_q; ++i) {
          const double lse = load_element(p.lse, lse_offset(p.lse, b, h, i));
          const double dlse = p.dlse.defined() ? load_element(p.dlse, lse_offset(p.dlse, b, h, i)) : 0.0;
          const double* dout_row = &dout[i * p.head_dim_v];
          // d out / d score subtracts the row's mean of dP under P; d lse / d score adds P itself.
          const double delta = (i < row_end ? dot(&out[i * p.head_dim_v], dout_row, p.head_dim_v) : 0.0) - dlse;
          // The sink's score has a gradient as every other, but its value, and so its dP, is 0.
          if (sink != -kInfinity) dsink[static_cast<std::size_t>(h)] -= std::exp(sink - lse) * delta;
          for (int64_t j = 0; j < p.seqlen_k; ++j) {
            if (!visible[i * p.seqlen_k + j]) continue;
            const reference::Score score = score_of(p, &q[i * p.head_dim], &k[j * p.head_dim], alibi.bias(i, j));
            const double prob = std::exp(score.value - lse);
            const double factor = dropout.keeps(i, j) ? dropout.scale() : 0;  // scales the weight of v
            const double dprob = factor * dot(dout_row, &v[j * p.head_dim_v], p.head_dim_v);
            const double dscore = score.slope * prob * (dprob - delta);
            add_scaled(factor * prob, dout_row, &dv[j * p.head_dim_v], p.head_dim_v);
            add_scaled(dscore, &k[j * p.head_dim], &dq[i * p.head_dim], p.head_dim);
            add_scaled(dscore, &q[i * p.head_dim], &dk[j * p.head_dim], p.head_dim);
          }
        }
        store_head(p.dq, b, h, dq);
      }
      store_head(p.dk, b, hk, dk);
      store_head(p.dv, b, hk, dv);
    }
  }
  for (int64_t h = 0; h < p.heads_q; ++h) store_dsink(p, h, dsink[static_cast<std::size_t>(h)]);
}

struct ReferenceCall {
  TileShape tile() const { return {kGranuleRows, kGranuleKeys}; }
  bool reads_plan(const Problem&) const { return false; }
  int64_t workspace_bytes() const { return 0; }
  void explain(const Problem&, Explanation& e) const { e.configuration = "element by element in float64, 1 thread"; }
  void run(const Problem& p, std::byte*) const { p.is_backward ? backward(p) : forward(p); }
};

class ReferenceBackend final : public Backend {
 public:
  std::string_view name() const override { return "reference"; }
  BackendInfo info() const override {
    return {"reference", true, "naive float64 loops on one thread; the oracle of the tests"};
  }
  bool automatic() const override { return false; }
  Prepared prepare(const Problem& p) const override {
    if (const char* why = host_refusal(p)) return Refusal{why};
    return Launch(p, ReferenceCall());
  }
  PreparedCached prepare_cached(const CachedProblem& p) const override {
    if (const char* why = host_refusal(p.device, p.stream)) return Refusal{why};
    return CachedLaunch{0,
                        [](const CachedProblem&, CachedExplanation& e) {
                          e.kernel = "element by element in float64, 1 thread";
                          e.splits = "none";
                        },
                        reference::cached_forward};
  }
};

}  // namespace

const Backend& reference_backend() {
  static const ReferenceBackend backend;
  return backend;
}

}  // namespace flashmask
