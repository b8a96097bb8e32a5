// SPDX-License-Identifier: Apache-2.0
#include <omp.h>

#include <algorithm>
#include <memory>

#include "backends/backend.h"
#include "backends/cpu/tile_kernels.h"
#include "common/arithmetic.h"
#include "common/message.h"

namespace flashmask {
namespace {

constexpr int64_t kAlignment = 64;

int thread_count(const Problem& p) { return p.threads > 0 ? p.threads : omp_get_max_threads(); }

bool makes_plan(const Problem& p) { return !p.plan.defined() && !p.dense.defined(); }

/// What the workspace holds, in this order; each part begins on a cache line.
struct Layout {
  int64_t plan = 0, delta = 0, scratch = 0;
  int threads;

  explicit Layout(const Problem& p) : threads(thread_count(p)) {
    const MaskView& mask = p.mask.view();
    if (makes_plan(p)) plan = round_up(PlanLayout(mask.seqlen_q, mask.seqlen_k, mask.batch(), mask.heads()).bytes, kAlignment);
    if (p.is_backward) delta = round_up(p.batch * p.heads_q * p.seqlen_q * static_cast<int64_t>(sizeof(float)), kAlignment);
    scratch = static_cast<int64_t>(cpu::scratch_bytes(p));
  }
  int64_t bytes() const { return plan + delta + threads * scratch + kAlignment; }
};

/// The workspace of a running call, with the call's plan in it if it brought none.
class Workspace {
 public:
  Workspace(Problem& p, std::span<std::byte> memory) : layout_(p) {
    void* begin = memory.data();
    std::size_t space = memory.size();
    base_ = static_cast<std::byte*>(std::align(kAlignment, memory.size() - kAlignment, begin, space));
    if (!makes_plan(p)) return;
    const std::span<std::byte> buffer(base_, static_cast<std::size_t>(layout_.plan));
    build_plan(p.mask.view(), buffer);
    p.plan = PlanView(buffer);
  }
  int threads() const { return layout_.threads; }
  cpu::Delta delta() const { return {reinterpret_cast<float*>(base_ + layout_.plan)}; }
  float* scratch(int thread) const { return reinterpret_cast<float*>(base_ + layout_.plan + layout_.delta + thread * layout_.scratch); }

 private:
  Layout layout_;
  std::byte* base_;
};

/// Calls item(b, h, n-th tile, scratch) for every batch entry, head and tile on the workspace's threads, handing
/// out all heads' first tiles first, and sums up what the calls return.
template <typename Item>
int64_t for_each_item(int64_t batch, int64_t heads, int64_t tiles, const Workspace& workspace, const Item& item) {
  const int64_t sequences = batch * heads;
  int64_t executed = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(workspace.threads()) reduction(+ : executed)
  for (int64_t n = 0; n < tiles * sequences; ++n) {
    const int64_t sequence = n % sequences;
    executed += item(sequence / heads, sequence % heads, n / sequences, workspace.scratch(omp_get_thread_num()));
  }
  return executed;
}

/// The row tile (key tile) to hand out n-th: the one with most work first. Any order gives the same bits.
int64_t nth_row_tile(const Problem& p, int64_t b, int64_t h, int64_t n) {
  return p.dense.defined() ? n : p.plan.row_order(p.mask_index(b, h))[static_cast<std::size_t>(n)];
}
int64_t nth_key_tile(const Problem& p, int64_t b, int64_t hk, int64_t n) {
  return p.dense.defined() ? n : p.plan.key_order(p.mask_index(b, hk * p.group_size()))[static_cast<std::size_t>(n)];
}

class CpuBackend final : public Backend {
 public:
  std::string_view name() const override { return "cpu"; }
  BackendInfo info() const override { return {"cpu", true, message(cpu::simd_target(), ", ", omp_get_max_threads(), " threads")}; }
  std::string refusal(const Problem& p) const override {
    if (p.device.kind != Device::Kind::kCpu) return "takes CPU tensors only";
    if (p.stream) return "stream must be null on the CPU";
    if (p.dtype == DataType::kFloat64) return "float64 is taken by backend 'reference' only; cast to float32 or ask for 'reference'";
    return "";
  }
  std::string configuration(const Problem& p) const override {
    return message(cpu::kTileRows, "x", cpu::kTileKeys, " tiles, ", cpu::simd_target(), ", ", thread_count(p), " threads, ",
                   name_of_mode(p));
  }
  TileShape tile(const Problem&) const override { return {cpu::kTileRows, cpu::kTileKeys}; }
  std::size_t workspace(const Problem& p) const override { return static_cast<std::size_t>(Layout(p).bytes()); }
  void forward(const Problem& problem, std::span<std::byte> memory) const override;
  void backward(const Problem& problem, std::span<std::byte> memory) const override;

 private:
  static const char* name_of_mode(const Problem& p) {
    if (p.dense.defined()) return "dense mask: every tile executed";
    return p.plan.defined() ? "plan given" : "plan made in the call";
  }
};

void CpuBackend::forward(const Problem& problem, std::span<std::byte> memory) const {
  Problem p = problem;
  const Workspace workspace(p, memory);
  const int64_t executed = for_each_item(
      p.batch, p.heads_q, ceil_div(p.seqlen_q, cpu::kTileRows), workspace,
      [&](int64_t b, int64_t h, int64_t n, float* scratch) { return cpu::forward_rows(p, b, h, nth_row_tile(p, b, h, n), scratch); });
  if (p.executed_tiles) p.executed_tiles->forward += executed;
}

void CpuBackend::backward(const Problem& problem, std::span<std::byte> memory) const {
  Problem p = problem;
  const Workspace workspace(p, memory);
  const cpu::Delta delta = workspace.delta();
  const int64_t row_tiles = ceil_div(p.seqlen_q, cpu::kTileRows), key_tiles = ceil_div(p.seqlen_k, cpu::kTileKeys);
  const int64_t by_rows = for_each_item(p.batch, p.heads_q, row_tiles, workspace, [&](int64_t b, int64_t h, int64_t n, float* scratch) {
    return cpu::backward_rows(p, delta, b, h, nth_row_tile(p, b, h, n), scratch);
  });
  const int64_t by_keys = for_each_item(p.batch, p.heads_kv, key_tiles, workspace, [&](int64_t b, int64_t hk, int64_t n, float* scratch) {
    return cpu::backward_keys(p, delta, b, hk, nth_key_tile(p, b, hk, n), scratch);
  });
  if (!p.executed_tiles) return;
  p.executed_tiles->backward_rows += by_rows;
  p.executed_tiles->backward_keys += by_keys;
}

}  // namespace

const Backend& cpu_backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace flashmask
