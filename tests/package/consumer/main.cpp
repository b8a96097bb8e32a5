// SPDX-License-Identifier: Apache-2.0
// Two packed documents of 3 and 5 tokens: a row of the second never sees the first. Also a drawing, and an error,
// caught by its type.
#include <flashmask/draw.h>
#include <flashmask/flashmask.h>

#include <array>
#include <cstdio>
#include <vector>

int main() {
  using namespace flashmask;
  constexpr int64_t kSeqlen = 8, kHeads = 2, kDim = 16;
  const std::array<int64_t, 2> lengths{3, 5};
  const Mask mask = masks::causal_document(Documents::from_lengths(lengths));
  const Plan plan(mask);

  std::vector<float> q(kSeqlen * kHeads * kDim, 0.5f), k = q, v(q.size()), out(q.size()), lse(kHeads * kSeqlen);
  for (std::size_t n = 0; n < v.size(); ++n) v[n] = static_cast<float>(n / (kHeads * kDim));  // the key's position
  const auto tensor = [](std::vector<float>& x) {
    return TensorView::contiguous(x.data(), DataType::kFloat32, {1, kSeqlen, kHeads, kDim});
  };
  ForwardArgs args;
  args.q = tensor(q);
  args.k = tensor(k);
  args.v = tensor(v);
  args.out = tensor(out);
  args.lse = TensorView::contiguous(lse.data(), DataType::kFloat32, {1, kHeads, kSeqlen});
  args.mask = mask;
  args.plan = plan.view();
  std::vector<std::byte> workspace(forward_workspace(args));
  forward(args, workspace);

  // All scores are equal, so the last row averages the positions 3 to 7 of its document.
  const float last = out[(kSeqlen - 1) * kHeads * kDim];
  std::printf("%s", to_string(explain(args)).c_str());
  std::printf("\nlast row: %g (expected 5)\n", static_cast<double>(last));
  if (!(last > 4.999f && last < 5.001f)) return 1;

  std::printf("%s", draw_text(mask).c_str());
  if (draw_svg(mask).find("</svg>") == std::string::npos) return 4;

  args.q.dtype = DataType::kInt32;
  try {
    forward_workspace(args);
  } catch (const Error& error) {
    return error.code() == ErrorCode::kInvalidArgument ? 0 : 2;
  }
  return 3;
}
