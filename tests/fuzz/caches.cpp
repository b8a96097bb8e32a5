// SPDX-License-Identifier: Apache-2.0

// Attention over a cache by the C interface, with any lengths, tables, masks and slots: a right call is drawn, its
// tensors' contents are any bytes, and then some fields of its structs are changed. Tensors lie in memory of exactly
// the size that they claim; calls write to no byte but the elements of their rows.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <span>
#include <vector>

#include "flashmask/c_api.h"
#include "fuzz/byte_reader.h"
#include "fuzz/c_tensors.h"
#include "fuzz/check.h"

namespace flashmask::fuzz {
namespace {

constexpr double kMostWork = 3e5;  ///< elements of the score matrices

struct Sizes {
  int64_t batch, pages, page_size, entries, heads_kv, heads_q, rows, dim, dim_v;
};

/// The structs of a call and of an append, and what is changed in them.
struct DrawnCaches {
  explicit DrawnCaches(ByteReader& bytes);
  DrawnCaches(const DrawnCaches&) = delete;  // `tensors` point into it
  DrawnCaches& operator=(const DrawnCaches&) = delete;

  fm_kv_cache cache{};
  fm_sequence_mask mask{};
  fm_cached_args args{};
  fm_append_args append{};
  fm_cached_plan plan{};
  fm_options options{};
  std::vector<Argument> tensors;
  bool has_mask = false, with_plan = false, null_cache = false, append_is_right = true;
  uint8_t workspace = 0;  ///< 1: a byte less, 2: none
  int changes = 0;

 private:
  void draw_cache(ByteReader& bytes, const Sizes& n, int32_t dtype);
  void draw_mask(ByteReader& bytes, const Sizes& n, bool packed);
  void draw_rows(ByteReader& bytes, const Sizes& n, int32_t dtype, bool packed);
  void draw_append(ByteReader& bytes, const Sizes& n, int32_t dtype, bool packed);
  void change(ByteReader& bytes);
};

/// Gives each struct its size.
template <typename... Structs>
void set_sizes(Structs&... structs) {
  ((structs.struct_size = sizeof(structs)), ...);
}

void DrawnCaches::draw_cache(ByteReader& bytes, const Sizes& n, int32_t dtype) {
  const uint8_t kind = bytes.byte(), layout = bytes.byte() & 1;
  const int32_t stored = (kind & 3) < 2 ? dtype : (kind & 3) == 2 ? FM_FLOAT8_E4M3 : FM_UINT8;
  const bool in_pages = kind & 4;
  const int64_t pages = in_pages ? n.pages : n.batch;
  lay_out(cache.k, stored, {pages, n.page_size, n.heads_kv, n.dim}, layout);
  lay_out(cache.v, stored, {pages, n.page_size, n.heads_kv, n.dim_v}, layout);
  if (in_pages && kind & 8) {
    lay_out(cache.page_indptr, FM_INT32, {n.batch + 1});
    lay_out(cache.page_indices, FM_INT32, {n.entries});
  } else if (in_pages) {
    lay_out(cache.page_table, FM_INT32, {n.batch, n.entries}, layout);
  }
  if (kind & 16) lay_out(cache.seqlens, FM_INT32, {n.batch});
  if (stored == dtype) return;
  if (kind & 32) lay_out(cache.k_scale, FM_FLOAT32, {pages, kind & 128 ? 1 : n.page_size, n.heads_kv});
  if (kind & 64 && kind & 128) lay_out(cache.v_scale, FM_FLOAT32, {pages, 1, 1});
  if (kind & 64 && !(kind & 128)) lay_out(cache.v_scale, FM_FLOAT32, {n.heads_kv});
}

void DrawnCaches::draw_mask(ByteReader& bytes, const Sizes& n, bool packed) {
  const uint8_t kind = bytes.byte(), more = bytes.byte();
  constexpr int64_t kTails[] = {0, 1, 3, 5, 31, 33, 64, 128};
  has_mask = kind & 1;
  if (kind & 2) mask.flags |= FM_CAUSAL;
  if (kind & 4) mask.flags |= FM_HAS_WINDOW, mask.window_left = bytes.byte() % 32 - 1, mask.window_right = more % 4 - 1;
  if (kind & 8) mask.flags |= FM_KEYS_IN_PAGES;
  const int64_t pages = cache.k.shape[0], vectors = (kind & 2 ? 1 : 2) * (kind & 16 ? 2 : 1);
  const int64_t heads = more & 1 ? n.heads_kv : 1, columns = bytes.byte() % 40;
  if (kind & 32 && kind & 8) lay_out(mask.bounds, FM_INT32, {pages, n.page_size, heads, vectors}, more & 1);
  if (kind & 32 && !(kind & 8)) lay_out(mask.bounds, FM_INT32, {more & 2 ? n.batch : 1, heads, columns, vectors});
  if (more & 32) {
    constexpr int64_t kBlocks[] = {0, 1, 2, 3};
    const int32_t dtype = more & 64 ? FM_BOOL : FM_UINT8;
    lay_out(mask.block_mask, dtype, {more & 2 ? n.batch : 1, heads, bytes.one_of(kBlocks), bytes.one_of(kBlocks)});
  }
  const bool has_positions = kind & 64;
  if (kind & 128) {
    const int64_t size = bytes.one_of(kTails);
    lay_out(mask.tail, FM_INT32, {n.batch, size, (size + 31) / 32});
    if (more & 4) lay_out(mask.tail_lens, FM_INT32, {n.batch});
    if (more & 8 && !has_positions) lay_out(mask.tail_depth, FM_INT32, {n.batch, size});
  }
  if (!has_positions) return;
  packed ? lay_out(mask.q_pos, FM_INT32, {n.rows}) : lay_out(mask.q_pos, FM_INT32, {n.batch, n.rows});
  if (!(more & 16) && !(kind & 128)) return;
  kind & 8 ? lay_out(mask.k_pos, FM_INT32, {pages, n.page_size}) : lay_out(mask.k_pos, FM_INT32, {1, columns});
}

void DrawnCaches::draw_rows(ByteReader& bytes, const Sizes& n, int32_t dtype, bool packed) {
  const uint8_t kind = bytes.byte(), layout = kind & 1;
  const int32_t of_lse = dtype == FM_FLOAT64 ? FM_FLOAT64 : FM_FLOAT32;
  if (packed) {
    lay_out(args.cu_seqlens_q, FM_INT32, {n.batch + 1});
    lay_out(args.q, dtype, {n.rows, n.heads_q, n.dim}, layout);
    lay_out(args.out, dtype, {n.rows, n.heads_q, n.dim_v}, layout);
    if (kind & 2) lay_out(args.lse, of_lse, {n.heads_q, n.rows}, layout);
  } else {
    lay_out(args.q, dtype, {n.batch, n.rows, n.heads_q, n.dim}, layout);
    lay_out(args.out, dtype, {n.batch, n.rows, n.heads_q, n.dim_v}, layout);
    if (kind & 2) lay_out(args.lse, of_lse, {n.batch, n.heads_q, n.rows}, layout);
  }
  if (kind & 4) args.split_size = 128;
  if (kind & 8) lay_out(options.sink, FM_FLOAT32, {n.heads_q});
  if (kind & 16) lay_out(options.alibi_slopes, FM_FLOAT32, {n.heads_q});
  if (kind & 32) options.softcap = 3;
  options.threads = 1 + (kind >> 6 & 1);
  static constexpr const char* kBackends[] = {nullptr, "reference"};
  options.backend = kBackends[dtype == FM_FLOAT64 || kind & 128];
}

void DrawnCaches::draw_append(ByteReader& bytes, const Sizes& n, int32_t dtype, bool packed) {
  const uint8_t kind = bytes.byte();
  const bool has_slots = kind & 1, loose = has_slots && packed && kind & 2;
  if (packed) {
    lay_out(append.k, dtype, {n.rows, n.heads_kv, n.dim});
    lay_out(append.v, dtype, {n.rows, n.heads_kv, n.dim_v}, kind >> 3 & 1);
    if (!loose) append.cu_seqlens = args.cu_seqlens_q;
    if (has_slots) lay_out(append.slots, kind & 16 ? FM_INT64 : FM_INT32, {n.rows});
  } else {
    lay_out(append.k, dtype, {n.batch, n.rows, n.heads_kv, n.dim}, kind >> 3 & 1);
    lay_out(append.v, dtype, {n.batch, n.rows, n.heads_kv, n.dim_v});
    if (has_slots) lay_out(append.slots, kind & 16 ? FM_INT64 : FM_INT32, {n.batch, n.rows});
  }
  const bool in_pages = mask.flags & FM_KEYS_IN_PAGES, has_bounds = has_mask && kind & 4 && mask.bounds.dtype;
  append_is_right = (has_slots || cache.seqlens.dtype) && !(has_bounds && has_slots && !in_pages);
  if (kind & 32) {
    append.flags |= FM_WRITE_SCALES;
    const auto is_shared = [&](const fm_tensor& scale) { return scale.ndim < 3 && cache.k.shape[0] > 1; };
    append_is_right &= cache.k_scale.dtype && cache.v_scale.dtype && !is_shared(cache.v_scale);
  }
  if (!has_bounds) return;
  const int64_t heads = mask.bounds.shape[in_pages ? 2 : 1], vectors = mask.bounds.shape[3];
  packed ? lay_out(append.bounds, FM_INT32, {n.rows, heads, vectors})
         : lay_out(append.bounds, FM_INT32, {n.batch, n.rows, heads, vectors});
}

void DrawnCaches::change(ByteReader& bytes) {
  ++changes;
  const uint8_t what = bytes.byte() % 24;
  uint32_t* const sizes[] = {&cache.struct_size, &mask.struct_size, &args.struct_size, &append.struct_size};
  int64_t* const numbers[] = {&mask.window_left, &mask.window_right, &args.split_size,     &plan.max_batch,
                              &plan.max_rows,    &plan.max_keys,     &plan.max_total_keys, &plan.heads_q,
                              &plan.heads_kv,    &plan.split_size};
  uint32_t* const flags[] = {&mask.flags, &args.flags, &plan.flags, &cache.reserved, &append.flags};
  if (what < 12) return change_tensor(bytes, tensors);
  if (what < 16) {
    uint32_t& size = *sizes[what - 12];
    size = draw_struct_size(bytes, size);
  } else if (what < 19) {
    *numbers[bytes.byte() % std::size(numbers)] = draw_wrong(bytes);
  } else if (what < 21) {
    *flags[bytes.byte() % std::size(flags)] ^= 1u << bytes.byte() % 32;
  } else if (what == 21) {
    null_cache = true;
  } else if (what == 22) {
    workspace = 1 + bytes.byte() % 2;
  } else {
    options.threads = static_cast<int32_t>(draw_wrong(bytes));
  }
}

DrawnCaches::DrawnCaches(ByteReader& bytes) {
  const int wrong = std::max(bytes.byte() % 8 - 4, 0);
  const uint8_t first = bytes.byte(), second = bytes.byte(), third = bytes.byte(), dims = bytes.byte();
  constexpr int64_t kPageSizes[] = {1, 2, 3, 4, 5, 16, 64, 150};
  constexpr int32_t kDtypes[] = {FM_FLOAT32, FM_BFLOAT16, FM_FLOAT16, FM_FLOAT64};
  const int64_t heads_kv = 1 + (first >> 2 & 1);
  const Sizes n{.batch = first & 3,
                .pages = second & 7,
                .page_size = kPageSizes[second >> 3 & 7],
                .entries = second >> 6,
                .heads_kv = heads_kv,
                .heads_q = heads_kv * (1 + (first >> 3 & 3)),
                .rows = third & 15,
                .dim = 1 + (dims & 15),
                .dim_v = 1 + (dims >> 4)};
  const bool packed = first & 32;
  const int32_t dtype = kDtypes[first >> 6];
  set_sizes(cache, mask, args, append, plan, options);
  draw_cache(bytes, n, dtype);
  draw_mask(bytes, n, packed);
  draw_rows(bytes, n, dtype, packed);
  draw_append(bytes, n, dtype, packed);
  with_plan = third & 16;
  const int64_t requests = packed ? 1 : n.batch;
  plan.max_batch = n.batch, plan.max_rows = n.rows * requests,
  plan.max_keys = n.page_size * std::max<int64_t>(n.entries, 1);
  plan.heads_q = n.heads_q, plan.heads_kv = n.heads_kv, plan.head_dim = n.dim, plan.head_dim_v = n.dim_v;
  plan.split_size = args.split_size;
  for (fm_tensor* t : {&args.q,
                       &args.out,
                       &args.lse,
                       &args.cu_seqlens_q,
                       &cache.k,
                       &cache.v,
                       &cache.page_table,
                       &cache.page_indptr,
                       &cache.page_indices,
                       &cache.seqlens,
                       &cache.k_scale,
                       &cache.v_scale,
                       &mask.bounds,
                       &mask.tail,
                       &mask.tail_lens,
                       &mask.tail_depth,
                       &mask.q_pos,
                       &mask.k_pos,
                       &mask.block_mask,
                       &options.sink,
                       &append.k,
                       &append.v,
                       &append.cu_seqlens,
                       &append.slots,
                       &append.bounds,
                       &options.alibi_slopes})
    tensors.push_back({t});
  for (int i = 0; i < wrong; ++i) change(bytes);
}

// --- The calls -------------------------------------------------------------------------------------

/// A tensor's memory and what was in it.
struct Bound {
  const fm_tensor* tensor;
  char* begin = nullptr;
  std::vector<char> before;

  bool is_as_before() const { return std::equal(before.begin(), before.end(), begin); }
  void remember() { std::copy_n(begin, before.size(), before.begin()); }
};

/// Any number that fits a length, page or row; now and then one at an end of its type.
int64_t draw_content(ByteReader& bytes, int64_t least, int64_t most) {
  const uint8_t value = bytes.byte();
  if (value == 255) return most;
  if (value == 254) return least;
  return value < 16 ? -value : value % 32;
}

class Calls {
 public:
  Calls(ByteReader& bytes, DrawnCaches& drawn) : drawn_(drawn) {
    bound_.reserve(drawn.tensors.size());
    for (Argument& argument : drawn.tensors) bind(bytes, argument);
    drawn.args.cache = drawn.append.cache = drawn.null_cache ? nullptr : copied(drawn.cache);
    drawn.args.mask = drawn.append.mask = drawn.has_mask ? copied(drawn.mask) : nullptr;
  }

  void run(ByteReader& bytes) {
    ask();
    if (!can_run()) return;
    const fm_cached_args* const args = copied(drawn_.args);
    judged(fm_cached_validate(args));
    std::size_t length = 0;
    judged(fm_explain_cached(args, &drawn_.options, nullptr, 0, &length));
    forward(args);
    if (drawn_.with_plan) forward_with_plan(bytes);
    run_append();
  }

 private:
  void bind(ByteReader& bytes, Argument& argument) {
    fm_tensor& t = *argument.tensor;
    const auto claim = claim_of(t);
    argument.readable = claim.has_value();
    Bound& bound = bound_.emplace_back(Bound{.tensor = &t, .before = {}});
    if (!claim) {
      t.data = argument.null ? nullptr : nowhere();
      return;
    }
    bound.begin = memory_.take(claim->before + claim->after, argument.misaligned);
    bound.before.resize(claim->before + claim->after);
    fill(bytes, bound);
    t.data = argument.null ? nullptr : bound.begin + claim->before;
  }
  /// Numbers that may be meant where they are integers, else any bytes.
  void fill(ByteReader& bytes, Bound& bound) {
    const std::size_t size = std::min<std::size_t>(bound.before.size(), 2048),
                      step = bound.tensor->dtype == FM_INT64 ? 8 : 4;
    const bool is_tail = bound.tensor == &drawn_.mask.tail;
    if (bound.tensor->dtype == FM_INT64 || (bound.tensor->dtype == FM_INT32 && !is_tail)) {
      for (std::size_t at = 0; at + step <= size; at += step) {
        const int64_t value =
            step == 8 ? draw_content(bytes, INT64_MIN, INT64_MAX) : draw_content(bytes, INT32_MIN, INT32_MAX);
        const auto narrow = static_cast<int32_t>(value);
        step == 8 ? std::memcpy(bound.begin + at, &value, 8) : std::memcpy(bound.begin + at, &narrow, 4);
      }
    } else {
      for (std::size_t at = 0; at < size; ++at) bound.begin[at] = static_cast<char>(bytes.byte());
    }
    bound.remember();
  }

  /// In memory of the size that it says it has, unless that is refused at once.
  template <typename Struct>
  Struct* copied(const Struct& from) {
    return memory_.copy(from, from.struct_size <= 65536 ? std::max<std::size_t>(from.struct_size, 8) : 8);
  }

  Bound& bound_of(const fm_tensor& t) {
    return *std::find_if(bound_.begin(), bound_.end(), [&](const Bound& b) { return b.tensor == &t; });
  }
  bool is_right() const { return drawn_.changes == 0; }

  void ask() {
    std::size_t bytes = 0;
    const fm_cached_args* const args = copied(drawn_.args);
    require(judged(fm_cached_forward_workspace(args, &drawn_.options, nullptr)) != FM_OK,
            "there is nowhere to write to");
    const fm_status status = judged(fm_cached_forward_workspace(args, &drawn_.options, &bytes));
    require(!is_right() || status == FM_OK, "a right call is taken");
    shapes_fit_ = status == FM_OK;
    char small[64];
    if (!shapes_fit_)
      require(judged(fm_cached_forward(args, small, sizeof(small), &drawn_.options)) != FM_OK,
              "a call whose shapes are wrong is refused");
    judged(fm_cached_plan_bytes(copied(drawn_.plan), &drawn_.options, &bytes));
  }

  /// True if the calls may read all of their tensors and do not take long.
  bool can_run() const {
    const auto elements = [](const fm_tensor& t, int dims) {
      double n = 1;
      for (int d = 0; d < std::clamp(t.ndim, 0, dims); ++d) n *= static_cast<double>(std::max<int64_t>(t.shape[d], 1));
      return n;
    };
    const fm_kv_cache& c = drawn_.cache;
    const double page = elements(c.k, 3) / std::max<double>(1, static_cast<double>(c.k.shape[0]));
    const double keys = page * std::max(elements(c.page_table, 2), elements(c.page_indices, 1));
    const double rows = std::max(elements(drawn_.args.q, 3), elements(drawn_.append.k, 2));
    return rows * keys * elements(drawn_.args.cu_seqlens_q, 1) <= kMostWork &&
           std::all_of(drawn_.tensors.begin(), drawn_.tensors.end(), [](const Argument& a) { return a.readable; });
  }

  void forward(const fm_cached_args* args) {
    std::size_t bytes = 0;
    if (judged(fm_cached_forward_workspace(args, &drawn_.options, &bytes)) != FM_OK || bytes > 64 * kMostBytes) return;
    const std::size_t size = drawn_.workspace == 0 ? bytes : drawn_.workspace == 1 && bytes > 0 ? bytes - 1 : 0;
    char* const workspace = size == 0 ? nullptr : memory_.take(size, drawn_.workspace);
    const fm_status status = judged(fm_cached_forward(args, workspace, size, &drawn_.options));
    require(!is_right() || status == FM_OK, "a right call is taken");
    require(status != FM_OK || size == bytes, "a call does not do with less than it asked for");
    for (const Bound& bound : bound_) {
      const bool is_output = bound.tensor == &drawn_.args.out || bound.tensor == &drawn_.args.lse;
      require((is_output && status == FM_OK) || bound.is_as_before(), "a call writes to its results alone");
    }
    if (is_right()) check_results();
  }

  /// Forgives the elements with index i in row_dim, or with row_dim -1 all, whatever is in them.
  void forgive(const fm_tensor& t, int row_dim, int64_t i) {
    Bound& bound = bound_of(t);
    const auto size = static_cast<int64_t>(size_of(t.dtype));
    std::array<int64_t, 4> at{};
    const auto visit = [&](auto&& self, int d) -> void {
      if (d == t.ndim) {
        int64_t offset = 0;
        for (int e = 0; e < t.ndim; ++e) offset += at[static_cast<std::size_t>(e)] * t.stride[e];
        std::copy_n(bound.begin + offset * size, size, bound.before.begin() + offset * size);
        return;
      }
      const int64_t first = d == row_dim ? i : 0, end = d == row_dim ? i + 1 : t.shape[d];
      for (int64_t x = first; x < end; ++x) {
        at[static_cast<std::size_t>(d)] = x;
        self(self, d + 1);
      }
    };
    visit(visit, 0);
  }

  /// Requires that no byte of the results but those of requests' rows was written to.
  void check_results() {
    const fm_cached_args& a = drawn_.args;
    const bool packed = a.cu_seqlens_q.dtype != FM_NONE, has_lse = a.lse.dtype != FM_NONE;
    const int64_t rows = a.q.shape[packed ? 0 : 1], batch = packed ? a.cu_seqlens_q.shape[0] - 1 : 1;
    const auto* const ends = static_cast<const int32_t*>(a.cu_seqlens_q.data);
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t begin = packed ? std::clamp<int64_t>(ends[b], 0, rows) : 0;
      const int64_t end = packed ? std::clamp<int64_t>(ends[b + 1], begin, rows) : rows;
      for (int64_t i = begin; i < end; ++i) {
        forgive(a.out, packed ? 0 : 1, i);
        if (has_lse) forgive(a.lse, packed ? 1 : 2, i);
      }
    }
    require(bound_of(a.out).is_as_before() && bound_of(a.lse).is_as_before(), "rows of no request are not written");
  }

  void forward_with_plan(ByteReader& bytes) {
    fm_cached_plan* const plan = copied(drawn_.plan);
    std::size_t size = 0;
    if (judged(fm_cached_plan_bytes(plan, &drawn_.options, &size)) != FM_OK || size > kMostBytes) return;
    plan->buffer = memory_.take(size);
    plan->bytes = size;
    fm_cached_args* const args = copied(drawn_.args);
    if (judged(fm_cached_plan_build(args, plan, &drawn_.options)) != FM_OK) return;
    if (args->struct_size < sizeof(*args)) return;
    args->plan = plan;
    refill_results();
    forward(args);
    if (!shapes_fit_) return;
    // A stale plan reads and writes nothing outside.
    for (const fm_tensor* t : {&drawn_.cache.seqlens, &drawn_.cache.page_table, &drawn_.args.cu_seqlens_q})
      fill(bytes, bound_of(*t));
    refill_results();
    forward(args);
  }
  void refill_results() {
    for (const fm_tensor* t : {&drawn_.args.out, &drawn_.args.lse}) bound_of(*t).remember();
  }

  void run_append() {
    for (Bound& bound : bound_) bound.remember();
    const fm_status status = judged(fm_append_kv(copied(drawn_.append), nullptr));
    require(!is_right() || (status == FM_OK) == drawn_.append_is_right, "a right append is taken, and no other");
    for (const Bound& bound : bound_) {
      const bool is_scale = bound.tensor == &drawn_.cache.k_scale || bound.tensor == &drawn_.cache.v_scale;
      const bool is_target = bound.tensor == &drawn_.cache.k || bound.tensor == &drawn_.cache.v ||
                             (bound.tensor == &drawn_.mask.bounds && drawn_.append.bounds.dtype != FM_NONE) ||
                             (is_scale && drawn_.append.flags & FM_WRITE_SCALES);
      require((is_target && status == FM_OK) || bound.is_as_before(), "an append writes to the cache and bounds alone");
    }
    if (!is_right()) return;
    fm_kv_cache& cache = drawn_.cache;
    for (const fm_tensor* t : {&cache.k, &cache.v, &cache.k_scale, &cache.v_scale, &drawn_.mask.bounds}) {
      forgive(*t, -1, 0);
      require(bound_of(*t).is_as_before(), "an append writes to elements alone");
    }
  }

  DrawnCaches& drawn_;
  Memory memory_;
  std::vector<Bound> bound_;
  bool shapes_fit_ = false;
};

void check(std::span<const uint8_t> input) {
  ByteReader bytes(input);
  DrawnCaches drawn(bytes);
  Calls(bytes, drawn).run(bytes);
}

}  // namespace
}  // namespace flashmask::fuzz

// Ignores memory that LLVM's OpenMP keeps for its threads until the end.
extern "C" const char* __lsan_default_suppressions() { return "leak:libomp"; }

int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  flashmask::fuzz::check({data, size});
  return 0;
}
