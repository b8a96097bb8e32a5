// SPDX-License-Identifier: Apache-2.0
#include "cache/cached_call.h"
#include "cache/check_cache.h"

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "cache/cached_plan.h"
#include "cache/visible_keys.h"
#include "call/choice.h"
#include "call/workspace.h"
#include "common/host_memory.h"
#include "common/json.h"

namespace flashmask {
namespace {

/// Bytes of the keys and values that some row of a request sees, of each key head its own.
int64_t bytes_read(const CachedProblem& p) {
  int64_t keys = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence sequence(p, b);
    const VisibleKeys visible(p, sequence);
    std::vector<uint64_t> bits(static_cast<std::size_t>(sequence.rows().count));
    for (int64_t first = 0; first < sequence.keys(); first += KeyTile::kKeys) {
      const KeyTile tile(sequence, first, sequence.keys());
      for (int64_t hk = 0; hk < p.heads_kv; ++hk)
        keys +=
            std::popcount(visible.load(tile, hk, sequence.first_row(), static_cast<int64_t>(bits.size()), bits.data()));
    }
  }
  return keys * static_cast<int64_t>(element_size(p.cache_dtype)) * (p.head_dim + p.head_dim_v);
}

}  // namespace

CachedCall::CachedCall(const CachedForwardArgs& args, const Options& options, bool with_data)
    : problem_(check_cached(args, options, with_data)), launch_(launch_of(problem_, options.backend)) {
  if (problem_.plan && with_data) check_is_built_for(*problem_.plan, problem_);
}

std::size_t CachedCall::workspace_bytes() const { return padded_workspace(launch_.workspace_bytes); }

void CachedCall::run(std::span<std::byte> workspace) {
  check_workspace(workspace, workspace_bytes());
  if (!problem_.is_empty()) launch_.run(problem_, aligned(workspace));
}

std::size_t cached_forward_workspace(const CachedForwardArgs& args, const Options& options) {
  return with_memory_errors([&] { return CachedCall(args, options, false).workspace_bytes(); });
}

void cached_forward(const CachedForwardArgs& args, std::span<std::byte> workspace, const Options& options) {
  with_memory_errors([&] { CachedCall(args, options, true).run(workspace); });
}

void append_kv(const AppendArgs& args, const Options& options) {
  with_memory_errors([&] {
    const AppendProblem problem = check_append(args, options);
    check_stream(problem.call.device, options.stream);
    backend_for(problem.call.device.kind).append(problem);
  });
}

CachedExplanation explain_cached(const CachedForwardArgs& args, const Options& options) {
  return with_memory_errors([&] {
    const CachedProblem problem = check_cached(args, options, args.q.device.kind == Device::Kind::kCpu);
    auto choice = choose(problem, options.backend, Reasons::kAll);
    CachedExplanation result;
    result.rejected = std::move(choice.rejected);
    if (!choice.launch) return result;
    result.backend = choice.backend->name();
    result.workspace_bytes = padded_workspace(choice.launch->workspace_bytes);
    result.pages =
        !problem.has_tables() ? "contiguous" : message("pages of ", problem.page_size, " keys, found by a table");
    choice.launch->explain(problem, result);
    if (problem.device.kind == Device::Kind::kCpu) result.bytes_read = bytes_read(problem);
    return result;
  });
}

std::string to_json(const CachedExplanation& e) {
  return JsonObject()
      .add("backend", e.backend.empty() ? "null" : json_string(e.backend))
      .add_string("kernel", e.kernel)
      .add_string("splits", e.splits)
      .add_string("pages", e.pages)
      .add("bytes_read", e.bytes_read < 0 ? "null" : message(e.bytes_read))
      .add_number("workspace_bytes", e.workspace_bytes)
      .add("rejected", json_string_array(e.rejected))
      .text();
}

}  // namespace flashmask
