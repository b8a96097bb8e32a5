// SPDX-License-Identifier: Apache-2.0
#include "cache/cached_plan.h"
#include "cache/check_cache.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "call/backend.h"
#include "common/arithmetic.h"
#include "common/host_memory.h"
#include "common/message.h"
#include "mask/content_hash.h"
#include "mask/host_only.h"

namespace flashmask {
namespace {

/// First in a plan's buffer in host memory, which holds no more: there a call finds what rows see itself.
struct PlanHeader {
  uint64_t magic;
  uint64_t digest;
};
constexpr uint64_t kMagic = 0x666d2d6361636865u;

/// Properties of a call that a plan remembers, by their names in errors. k and v differ by layer, and q by call.
constexpr const char* kNames[] = {"the cache's dtype",
                                  "cu_seqlens_q",
                                  "the shape of cache.k",
                                  "the shape of cache.v",
                                  "page_table",
                                  "page_indptr or page_indices",
                                  "seqlens",
                                  "mask.bounds",
                                  "mask.tail",
                                  "mask.tail_lens",
                                  "mask.tail_depth",
                                  "mask.q_pos",
                                  "mask.k_pos",
                                  "mask.block_mask",
                                  "causal, window_size or the layout of the mask",
                                  "the plan's buffer, or one of its capacities,"};
/// Index of the digest of the rows.
constexpr std::size_t kRows = 1;
using Digests = decltype(CachedPlan::built_for);
static_assert(std::size(kNames) == std::tuple_size_v<Digests>);

uint64_t digest(std::initializer_list<int64_t> numbers) {
  uint64_t hash = content_hash::kGolden;
  for (const int64_t number : numbers)
    hash = content_hash::scramble(hash * content_hash::kGolden + static_cast<uint64_t>(number));
  return hash;
}

uint64_t shape_of(const TensorView& t) {
  const auto& s = t.shape;
  return digest({static_cast<int64_t>(t.dtype), t.rank, s[0], s[1], s[2], s[3], s[4]});
}

/// Digest of a tensor and its place in memory.
uint64_t identity_of(const TensorView& t) {
  if (!t.defined()) return 1;
  const auto& s = t.stride;
  return digest({static_cast<int64_t>(shape_of(t)), static_cast<int64_t>(reinterpret_cast<std::uintptr_t>(t.data)),
                 s[0], s[1], s[2], s[3], s[4]});
}

uint64_t both(const TensorView& a, const TensorView& b) {
  return digest({static_cast<int64_t>(identity_of(a)), static_cast<int64_t>(identity_of(b))});
}

/// Digest of what a plan knows of the rows. Without cu_seqlens_q that is their number, of no account in host memory.
uint64_t rows_of(const CachedProblem& p) {
  if (p.is_packed()) return identity_of(p.cu_seqlens_q);
  return digest({1, p.device.kind == Device::Kind::kCpu ? 0 : p.rows});
}

/// Digest of a plan itself: its parts lie in the buffer as the capacities say.
uint64_t itself(const CachedPlan& plan) {
  const CachedCapacities& c = plan.capacities;
  return digest({static_cast<int64_t>(reinterpret_cast<std::uintptr_t>(plan.buffer.data())),
                 static_cast<int64_t>(plan.buffer.size()), c.max_batch, c.max_rows, c.max_keys, c.heads_q, c.heads_kv,
                 c.head_dim, c.head_dim_v, c.max_total_keys, c.batch_invariant, c.split_size, c.float8, c.forest});
}

Digests digests_of(const CachedProblem& p, const CachedPlan& plan) {
  const KvCacheView& c = p.cache;
  const SequenceMaskView& m = p.mask;
  return {digest({static_cast<int64_t>(p.cache_dtype)}),
          rows_of(p),
          shape_of(c.k),
          shape_of(c.v),
          identity_of(c.page_table),
          both(c.page_indptr, c.page_indices),
          identity_of(c.seqlens),
          identity_of(m.bounds),
          identity_of(m.tail),
          identity_of(m.tail_lens),
          identity_of(m.tail_depth),
          identity_of(m.q_pos),
          identity_of(m.k_pos),
          identity_of(m.block_mask),
          digest({m.causal, p.diagonal_lo, p.diagonal_hi, static_cast<int64_t>(m.key_layout)}),
          itself(plan)};
}

uint64_t digest_of(const Digests& digests) {
  uint64_t hash = 0;
  for (const uint64_t x : digests) hash = content_hash::scramble(hash * content_hash::kGolden + x);
  return hash;
}

void check_capacities(const CachedCapacities& c) {
  for (const auto& [name, n] : {std::pair{"max_batch", c.max_batch},
                                {"max_rows", c.max_rows},
                                {"max_keys", c.max_keys},
                                {"max_total_keys", c.max_total_keys}}) {
    if (n < 0 || n > kMaxPlanBytes) throw_invalid(name, " is ", n, "; it must be between 0 and 2^40");
  }
  for (const auto& [name, n] : {std::pair{"heads_q", c.heads_q},
                                {"heads_kv", c.heads_kv},
                                {"head_dim", c.head_dim},
                                {"head_dim_v", c.head_dim_v}}) {
    if (n < 1) throw_invalid(name, " is ", n, "; it must be at least 1");
  }
  if (c.heads_q % c.heads_kv != 0)
    throw_invalid("heads_q is ", c.heads_q, " and heads_kv ", c.heads_kv, "; the former must be a multiple");
  if (c.forest && c.batch_invariant)
    throw_invalid("forest is set beside batch_invariant, whose splits are a request's; leave out one of them");
}

/// Throws unless the call is of one sequence, in a table within the plan's max_keys, as that of a forest is.
void check_is_forest(const CachedCapacities& c, const CachedProblem& p) {
  if (p.batch != 1) throw_invalid("the call has ", p.batch, " requests and the plan is a forest's; it must have one");
  if (p.cache.page_indptr.defined())
    throw_invalid("the cache has page_indptr and the plan is a forest's; it must have a page_table, or none");
  if (p.capacity > c.max_keys)
    throw_invalid("the request has room for ", p.capacity, " keys and the forest's plan max_keys ", c.max_keys);
}

/// Throws unless the plan has room for the call.
void check_fits(const CachedCapacities& c, const CachedProblem& p) {
  for (const auto& [what, got, capacity, name] :
       {std::tuple{"requests", p.batch, c.max_batch, "max_batch"}, {"rows", p.total_rows(), c.max_rows, "max_rows"}}) {
    if (got > capacity) throw_invalid("the call has ", got, " ", what, " and the plan ", name, " ", capacity);
  }
  if (!p.cache.page_indptr.defined() && p.capacity > round_up(c.max_keys, std::max<int64_t>(p.page_size, 1)))
    throw_invalid("a request has room for ", p.capacity, " keys and the plan max_keys ", c.max_keys);
  for (const auto& [name, got, planned] : {std::tuple{"heads_q", p.heads_q, c.heads_q},
                                           {"heads_kv", p.heads_kv, c.heads_kv},
                                           {"head_dim", p.head_dim, c.head_dim},
                                           {"head_dim_v", p.head_dim_v, c.head_dim_v},
                                           {"split_size", p.split_size, c.split_size}}) {
    if (got != planned) throw_invalid(name, " of the call is ", got, " and of the plan ", planned);
  }
  if (c.forest) check_is_forest(c, p);
  if (p.batch_invariant != c.batch_invariant)
    throw_invalid("batch_invariant of the call is ", p.batch_invariant, " and of the plan ", c.batch_invariant);
  if (p.has_float8() != c.float8)
    throw_invalid("the cache is ", name(p.cache_dtype), " and the plan is for one of ",
                  c.float8 ? "float8_e4m3" : "16 or 32 bits", "; float8 of its capacities says which");
}

/// The call that a plan is built for, with rows of any values: they are of no account to it. Without q and cu_seqlens_q
/// a request has as many rows as q_pos has positions, or one.
CachedForwardArgs with_rows(const CachedForwardArgs& args, const CachedCapacities& c, const Device& device) {
  CachedForwardArgs all = args;
  all.plan = nullptr;
  if (args.out.defined()) return all;
  const DataType own = args.cache.k.dtype;
  const bool is_float8 = own == DataType::kFloat8E4M3 || own == DataType::kUInt8;
  const DataType dtype = args.q.defined() ? args.q.dtype : is_float8 ? DataType::kFloat32 : own;
  const TensorView& q_pos = args.mask.q_pos;
  const auto rows_of = [&](int64_t dim) {
    TensorView t;
    if (args.cu_seqlens_q.defined()) {
      const int64_t rows = args.q.defined() ? args.q.shape[0] : q_pos.rank == 1 ? q_pos.shape[0] : c.max_rows;
      t = TensorView::contiguous(nullptr, dtype, {rows, c.heads_q, dim});
    } else {
      const KvCacheView& cache = args.cache;
      const int64_t batch = cache.page_table.defined()    ? cache.page_table.shape[0]
                            : cache.page_indptr.defined() ? cache.page_indptr.shape[0] - 1
                                                          : cache.k.shape[0];
      const int64_t rows = args.q.defined() ? args.q.shape[1] : q_pos.rank == 2 ? q_pos.shape[1] : 1;
      t = TensorView::contiguous(nullptr, dtype, {batch, rows, c.heads_q, dim});
    }
    t.device = device;
    return t;
  };
  if (!args.q.defined()) all.q = rows_of(c.head_dim);
  all.out = rows_of(c.head_dim_v);
  all.lse = {};
  return all;
}

/// The plan's buffer, checked.
PlanHeader& header_of(const CachedPlan& plan) {
  if (plan.buffer.size() < sizeof(PlanHeader))
    throw_invalid("the plan's buffer has ", plan.buffer.size(), " bytes; cached_plan_bytes says how many it needs");
  if (reinterpret_cast<std::uintptr_t>(plan.buffer.data()) % alignof(PlanHeader) != 0)
    throw_invalid("the plan's buffer is not aligned to ", alignof(PlanHeader), " bytes");
  return *reinterpret_cast<PlanHeader*>(plan.buffer.data());
}

/// True unless the buffer is in host memory and somebody else has written there.
bool holds_header(const CachedPlan& plan) {
  if (plan.device.kind != Device::Kind::kCpu) return true;
  const PlanHeader& header = header_of(plan);
  return header.magic == kMagic && header.digest == digest_of(plan.built_for);
}

void check_device(const CachedPlan& plan, const CachedProblem& p) {
  if (plan.device != p.device)
    throw_invalid("the plan is on ", describe(plan.device), " and q on ", describe(p.device),
                  "; a call has one device");
}

}  // namespace

std::size_t Backend::cached_plan_bytes(const CachedCapacities&, const Device&) const { return sizeof(PlanHeader); }

void Backend::build_cached_plan(const CachedProblem&, const CachedPlan& plan) const {
  header_of(plan) = {kMagic, digest_of(plan.built_for)};
}

std::size_t cached_plan_bytes(const CachedCapacities& capacities, const Device& device) {
  check_capacities(capacities);
  return backend_for(device.kind).cached_plan_bytes(capacities, device);
}

void build_cached_plan(const CachedForwardArgs& args, CachedPlan& plan, const Options& options) {
  with_memory_errors([&] {
    check_capacities(plan.capacities);
    const CachedProblem problem = check_cached(with_rows(args, plan.capacities, plan.device), options, false);
    check_stream(problem.device, options.stream);
    check_device(plan, problem);
    check_fits(plan.capacities, problem);
    CachedPlan built = plan;
    built.built_for = digests_of(problem, plan);
    plan.built_for = {};  // until it is: what throws leaves no plan
    backend_for(plan.device.kind).build_cached_plan(problem, built);
    plan.built_for = built.built_for;
  });
}

void check_is_built_for(const CachedPlan& plan, const CachedProblem& problem) {
  check_device(plan, problem);
  if (plan.built_for == Digests{} || !holds_header(plan))
    throw_invalid("the plan was never built, or its buffer holds something else; build it first (plan.update)");
  check_fits(plan.capacities, problem);
  const Digests now = digests_of(problem, plan);
  for (std::size_t n = 0; n < now.size(); ++n) {
    if (now[n] != plan.built_for[n])
      throw_invalid(n == kRows && !problem.is_packed() ? "the number of rows (rows of plan.update)" : kNames[n],
                    " is another than when the plan was built; build it again (plan.update)");
  }
}

}  // namespace flashmask
