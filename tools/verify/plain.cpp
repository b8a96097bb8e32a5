// SPDX-License-Identifier: Apache-2.0
#include "numerics/plain.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "verify/oracle.h"

namespace flashmask::verify {
namespace {

using numerics::Floats;
using numerics::KeyHead;
using numerics::PlainCall;
using numerics::QueryHead;
using numerics::round_to;

/// Stores a head rounded to the type.
void keep(DataType dtype, const Floats& from, std::span<double> to) {
  std::transform(from.begin(), from.end(), to.begin(), [dtype](float value) { return round_to(dtype, value); });
}

/// Runs the plain implementation on one case, head after head.
class PlainRun {
 public:
  PlainRun(const Problem& problem, const DenseMask& dense, const HeadArray& given_out, const HeadArray& exact_out)
      : problem_(problem),
        c_(problem.c),
        dense_(dense),
        given_out_(given_out),
        exact_out_(exact_out),
        q_(problem.q.values()),
        k_(problem.k.values()),
        v_(problem.v.values()),
        dout_(problem.dout.values()),
        dlse_(problem.dlse ? problem.dlse->values() : HeadArray()),
        sink_(problem.sink() ? problem.sink()->values() : HeadArray()),
        kept_(kept_matrix(problem)),
        plain_(c_) {}

  Plain run() {
    for (int64_t b = 0; b < c_.batch; ++b) {
      for (int64_t kv = 0; kv < c_.heads_kv; ++kv) run_key_head(b, kv);
    }
    return std::move(plain_);
  }

 private:
  void run_key_head(int64_t b, int64_t kv) {
    KeyHead keys(call_, k_.head(b, kv), v_.head(b, kv));
    const int64_t group = c_.heads_q / c_.heads_kv;
    for (int64_t h = kv * group; h < (kv + 1) * group; ++h) run_query_head(b, h, keys);
    keep(c_.dtype, keys.dk, plain_.results.dk.head(b, kv));
    keep(c_.dtype, keys.dv, plain_.results.dv.head(b, kv));
    keep(c_.dtype, keys.dk_for_given_out, plain_.dk_for_given_out.head(b, kv));
    std::copy(keys.inherited_dk.begin(), keys.inherited_dk.end(), plain_.inherited_dk.head(b, kv).begin());
  }

  void run_query_head(int64_t b, int64_t h, KeyHead& keys) {
    QueryHead queries(call_, q_.head(b, h), dout_.head(b, h),
                      dlse_.heads > 0 ? dlse_.head(b, h) : std::span<const double>{}, given_out_.head(b, h),
                      exact_out_.head(b, h));
    queries.score = plain_score(problem_, b, h);
    if (sink_.heads > 0) queries.sink = static_cast<float>(sink_.head(0, h)[0]);
    if (!kept_.empty()) queries.kept = kept_.data() + (b * c_.heads_q + h) * c_.seqlen_q * c_.seqlen_k;
    run_plain_head(call_, keys, queries, visible_matrix(c_, dense_, b, h));
    keep(c_.dtype, queries.out, plain_.results.out.head(b, h));
    keep(c_.dtype, queries.dq, plain_.results.dq.head(b, h));
    keep(c_.dtype, queries.dq_for_given_out, plain_.dq_for_given_out.head(b, h));
    std::copy(queries.inherited_dq.begin(), queries.inherited_dq.end(), plain_.inherited_dq.head(b, h).begin());
  }

  const Problem& problem_;
  const Case& c_;
  const PlainCall call_{
      c_.dtype, c_.seqlen_q, c_.seqlen_k, c_.head_dim, c_.head_dim_v, c_.scale(), dropout_scale(c_.features.dropout)};
  const DenseMask& dense_;
  const HeadArray &given_out_, &exact_out_;
  const HeadArray q_, k_, v_, dout_, dlse_, sink_;
  const std::vector<uint8_t> kept_;
  Plain plain_;
};

}  // namespace

Plain run_plain(const Problem& problem, const DenseMask& dense, const HeadArray& given_out,
                const HeadArray& exact_out) {
  return PlainRun(problem, dense, given_out, exact_out).run();
}

}  // namespace flashmask::verify
