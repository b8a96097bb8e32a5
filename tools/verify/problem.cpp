// SPDX-License-Identifier: Apache-2.0
#include "verify/problem.h"

#include <algorithm>

#include "flashmask/status.h"
#include "verify/random.h"

namespace flashmask::verify {
namespace {

/// Refuses what no machine holds, before sizes are multiplied.
const Case& checked(const Case& c) {
  constexpr double kMostElements = 0x1p40;
  const auto elements = [&](int64_t seqlen, int64_t heads, int64_t dim) {
    return static_cast<double>(c.batch) * static_cast<double>(seqlen) * static_cast<double>(heads) *
           static_cast<double>(dim);
  };
  const double largest = std::max(elements(c.seqlen_q, c.heads_q, std::max(c.head_dim, c.head_dim_v)),
                                  elements(c.seqlen_k, c.heads_kv, std::max(c.head_dim, c.head_dim_v)));
  if (largest > kMostElements) {
    throw Error(ErrorCode::kInvalidArgument,
                "a tensor would have more than 2^40 elements; use fewer batch entries or heads, or shorter sequences");
  }
  return c;
}

Tensor make_dout(const Case& c) {
  return c.expanded_dout ? Tensor::expanded(c.dtype, c.batch, c.seqlen_q, c.heads_q, c.head_dim_v)
                         : Tensor::attention(c.dtype, c.layout, c.batch, c.seqlen_q, c.heads_q, c.head_dim_v);
}

/// Any sixteens of a sequence that is longer than those of the case.
std::optional<Tensor> make_origin(const Case& c, int64_t seqlen, Random& random) {
  if (c.features.part == Part::kNone) return std::nullopt;
  const int64_t entries = c.features.part == Part::kEach ? c.batch : 1;
  Tensor origin = Tensor::contiguous(DataType::kInt32, {entries, (seqlen + 15) / 16});
  auto* const sixteens = static_cast<int32_t*>(origin.view().data);
  for (int64_t n = 0; n < origin.view().num_elements(); ++n)
    sixteens[n] = static_cast<int32_t>(random.integer(0, kMaxSeqlen / 16));
  return origin;
}

Tensor make_lse(const Case& c) { return Tensor::lse(DataType::kFloat32, c.layout, c.batch, c.heads_q, c.seqlen_q); }

}  // namespace

Problem::Problem(const Case& of)
    : c(checked(of)),
      q(Tensor::attention(c.dtype, c.layout, c.batch, c.seqlen_q, c.heads_q, c.head_dim)),
      k(Tensor::attention(c.dtype, c.layout, c.batch, c.seqlen_k, c.heads_kv, c.head_dim)),
      v(Tensor::attention(c.dtype, c.layout, c.batch, c.seqlen_k, c.heads_kv, c.head_dim_v)),
      dout(make_dout(c)),
      dropout_state{mix(c.seed, kDropoutStream), mix(c.seed, kDropoutStream + 1)} {
  if (c.dlse) dlse = make_lse(c);
  Random random(mix(c.seed, kTensorStream));
  const auto normal = [&] { return random.normal(); };
  q.fill(normal);
  k.fill(normal);
  v.fill(normal);
  dout.fill(normal);
  if (dlse) dlse->fill(normal);
  for (const CaseFeature& feature : case_features()) {
    if (feature.tensor && feature.kind(c.features) != 0) tensors.push_back({feature.member, feature.tensor(c, random)});
  }
  q_origin = make_origin(c, c.seqlen_q, random);
  k_origin = make_origin(c, c.seqlen_k, random);
}

const Tensor* Problem::sink() const {
  const auto found = std::ranges::find(tensors, &Features::sink, &FeatureTensor::member);
  return found == tensors.end() ? nullptr : &found->tensor;
}

Features Problem::features(const std::function<TensorView(std::size_t)>& view, const Dropout& there) const {
  Features features = numbers(c.features);
  for (std::size_t n = 0; n < tensors.size(); ++n) features.*tensors[n].member = view(n);
  if (features.dropout.p > 0) {
    features.dropout.state = there.state;
    features.dropout.q_origin = there.q_origin;
    features.dropout.k_origin = there.k_origin;
  }
  return features;
}

Features Problem::features() const {
  const auto view = [](const std::optional<Tensor>& origin) { return origin ? origin->view() : TensorView{}; };
  return features([this](std::size_t n) { return tensors[n].tensor.view(); },
                  {.state = dropout_state.data(), .q_origin = view(q_origin), .k_origin = view(k_origin)});
}

Outputs::Outputs(const Case& c)
    : out(Tensor::attention(c.result_dtype(), c.layout, c.batch, c.seqlen_q, c.heads_q, c.head_dim_v)),
      lse(make_lse(c)),
      dq(Tensor::attention(c.result_dtype(), c.layout, c.batch, c.seqlen_q, c.heads_q, c.head_dim)),
      dk(Tensor::attention(c.result_dtype(), c.layout, c.batch, c.seqlen_k, c.heads_kv, c.head_dim)),
      dv(Tensor::attention(c.result_dtype(), c.layout, c.batch, c.seqlen_k, c.heads_kv, c.head_dim_v)) {
  if (c.features.sink != SinkKind::kNone) dsink = Tensor::contiguous(c.sink_dtype(), {c.heads_q});
}

ForwardArgs forward_args(const AttentionInputs& inputs, const Outputs& outputs) {
  return {inputs, outputs.out.view(), outputs.lse.view()};
}

BackwardArgs backward_args(const AttentionInputs& inputs, const Problem& problem, const Outputs& outputs) {
  return {inputs,
          outputs.out.view(),
          outputs.lse.view(),
          problem.dout.view(),
          problem.dlse ? problem.dlse->view() : TensorView{},
          outputs.dq.view(),
          outputs.dk.view(),
          outputs.dv.view(),
          outputs.dsink ? outputs.dsink->view() : TensorView{}};
}

}  // namespace flashmask::verify
