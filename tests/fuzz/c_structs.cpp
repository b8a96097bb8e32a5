// SPDX-License-Identifier: Apache-2.0

// The C interface's structs with any values in them: a right call is drawn, then some of its fields are changed, and
// every function returns a status. A tensor lies in memory of exactly the size that its shape and strides claim, or, if
// they claim too much, at an unmapped address: such tensors go to functions that promise not to read, and into calls
// that have to be refused for their shapes and options alone.

#include "flashmask/c_api.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "fuzz/byte_reader.h"
#include "fuzz/c_tensors.h"
#include "fuzz/check.h"
#include "fuzz/drawn_call.h"

namespace flashmask::fuzz {
namespace {

constexpr double kMostWork = 4e5;  ///< elements of the score matrices

// --- The calls -------------------------------------------------------------------------------------

class Calls {
 public:
  Calls(ByteReader& bytes, Drawn& drawn) : drawn_(drawn) {
    for (Argument& argument : drawn.tensors) bind(bytes, argument);
    mask_ = drawn.null_struct == 1 ? nullptr : copied(drawn.mask);
    options_ = drawn.null_options ? nullptr : make_options();
    mask_readable_ = drawn.readable(drawn.mask.bounds) && drawn.readable(drawn.mask.block_mask);
    on_host_ = drawn.null_options || drawn.options.device == 0;
  }

  void run() {
    of_mask();
    of_dropout();
    of_attention();
  }

 private:
  void bind(ByteReader& bytes, Argument& argument) {
    fm_tensor& t = *argument.tensor;
    const std::optional<Claim> claim = claim_of(t);
    argument.readable = claim.has_value();
    char* data = nowhere();
    if (claim) {
      char* const begin = memory_.take(claim->before + claim->after, argument.misaligned);
      const std::size_t drawn = std::min<std::size_t>(claim->before + claim->after, 1024);
      for (std::size_t n = 0; n < drawn; ++n) begin[n] = static_cast<char>(bytes.byte());
      data = begin + claim->before;
    }
    // Rows that are near those of the call.
    if (claim && &t == &drawn_.mask.bounds && t.dtype == FM_INT32 && claim->before == 0) {
      for (std::size_t n = 0; n < std::min<std::size_t>(claim->after / 4, 256); ++n) {
        const int32_t row = bytes.bound();
        std::memcpy(data + n * 4, &row, 4);
      }
    }
    t.data = argument.null ? nullptr : data;
  }

  /// In memory of the size that it says it has, unless that is refused at once.
  template <typename Struct>
  Struct* copied(const Struct& from) {
    const std::size_t size = from.struct_size <= 65536 ? std::max<std::size_t>(from.struct_size, 8) : 8;
    return memory_.copy(from, size);
  }

  fm_options* make_options() {
    static const char* const kBackends[] = {nullptr, "auto", "cpu", "reference",
                                            "cuda",  "",     "CPU", "a name longer than any backend has"};
    drawn_.options.backend = kBackends[drawn_.backend % 8];
    drawn_.options.executed_tiles = drawn_.count ? &counted_ : nullptr;
    // Without, it gives no memory.
    if (drawn_.options.allocate && drawn_.null_struct % 2 == 0) {
      drawn_.options.allocate = [](void* context, std::size_t bytes) -> void* {
        return static_cast<Calls*>(context)->memory_.take(bytes);
      };
      drawn_.options.allocate_context = this;
    }
    return copied(drawn_.options);
  }

  /// Requires that a function takes the drawn call, as long as nothing was changed.
  void expect_taken(fm_status status) const { require(drawn_.changes > 0 || status == FM_OK, "a right call is taken"); }

  static std::size_t of_size(Size size, std::size_t right) {
    return size == Size::kRight ? right : size == Size::kNone || right == 0 ? 0 : right - 1;
  }

  void of_mask() {
    require(judged(fm_plan_bytes(mask_, nullptr)) != FM_OK, "there is nowhere to write to");
    const fm_status shapes = judged(fm_plan_bytes(mask_, &plan_bytes_));
    expect_taken(shapes);
    build_plan(shapes == FM_OK);
    to_dense(shapes == FM_OK);
    from_dense();
    if (shapes == FM_OK && mask_readable_) inspect();
  }

  void of_dropout() {
    const fm_tensor& v = drawn_.visible;
    double elements = 1;  // which overlap, perhaps
    for (int d = 0; d < 4; ++d) elements *= static_cast<double>(std::max<int64_t>(v.shape[d], 1));
    if (!drawn_.readable(v) || elements > 65536) return;
    expect_taken(judged(
        fm_dropout_mask(drawn_.options.dropout_p, drawn_.options.dropout_state, memory_.copy(v, sizeof(fm_tensor)))));
  }

  void build_plan(bool shapes_fit) {
    if (!shapes_fit) {
      uint64_t buffer[8];
      require(judged(fm_plan_build(mask_, buffer, sizeof(buffer), options_)) != FM_OK,
              "a mask of wrong shapes has no plan");
      return;
    }
    const bool fits = plan_bytes_ <= kMostBytes && mask_readable_;
    if (!fits && on_host_) {
      uint64_t buffer[2];
      require(judged(fm_plan_build(mask_, buffer, sizeof(buffer), options_)) != FM_OK,
              "a plan does not fit a smaller buffer");
    }
    if (!fits) return;
    const std::size_t size = of_size(drawn_.plan, plan_bytes_);
    char* const plan = drawn_.plan == Size::kNone ? nullptr : memory_.take(size);
    const fm_status built = judged(fm_plan_build(mask_, plan, size, options_));
    expect_taken(built);
    if (built != FM_OK) return;
    require(judged(fm_plan_validate(mask_, plan, size, nullptr, 0, options_)) == FM_OK, "a plan is that of its mask");
    plan_ = plan;
    // Change the header alone: the rest is trusted to be fm_plan_build's.
    if (!drawn_.plan_header) return;
    plan[drawn_.plan_header % 48] = static_cast<char>(plan[drawn_.plan_header % 48] ^ drawn_.plan_header);
    require(judged(fm_plan_validate(mask_, plan, size, nullptr, 0, options_)) != FM_OK, "a changed plan is another's");
  }

  void to_dense(bool shapes_fit) {
    const fm_mask& m = drawn_.mask;
    const fm_tensor& v = drawn_.visible;
    // A mask of another size may be refused for it. More entries or heads than a mask that may be read can have are
    // refused, too.
    const bool differs =
        m.struct_size == sizeof(m) && (v.shape[2] != m.seqlen_q || v.shape[3] != m.seqlen_k ||
                                       std::max(v.shape[0], v.shape[1]) > static_cast<int64_t>(kMostBytes));
    const bool writable = drawn_.readable(drawn_.visible);
    if (shapes_fit && (!mask_readable_ || !(writable || differs))) return;
    const fm_tensor* const visible =
        drawn_.null_struct == 3 ? nullptr : memory_.copy(drawn_.visible, sizeof(fm_tensor));
    const fm_status status = judged(fm_mask_to_dense(mask_, visible));
    expect_taken(status);
    require((shapes_fit && !differs) || status != FM_OK, "a matrix has the shape of its mask, whose shapes are right");
  }

  void from_dense() {
    if (!drawn_.readable(drawn_.visible)) return;
    const fm_tensor& v = drawn_.visible;
    const bool has_room = v.ndim == 4 && std::min({v.shape[0], v.shape[1], v.shape[3]}) > 0 &&
                          std::max({v.shape[0], v.shape[1], v.shape[3]}) <= static_cast<int64_t>(kMostBytes) &&
                          v.shape[0] * v.shape[1] <= static_cast<int64_t>(kMostBytes) / v.shape[3];
    fm_mask out = has_room ? room_for(v.shape[0], v.shape[1], v.shape[3]) : drawn_.mask;
    const fm_status status = judged(fm_mask_from_dense(&v, copied(out)));
    const bool needs_none = v.ndim == 4 && v.shape[3] == 0;
    require(has_room || needs_none || status != FM_OK, "there is no room for the vectors");
  }

  /// A mask with room for vectors.
  fm_mask room_for(int64_t batch, int64_t heads, int64_t seqlen_k) {
    fm_mask out{};
    out.struct_size = sizeof(out);
    lay_out(out.bounds, FM_INT32, {batch, heads, seqlen_k, 4});
    out.bounds.data = memory_.take(static_cast<std::size_t>(batch * heads * seqlen_k) * 16);
    return out;
  }

  void inspect() {
    const fm_mask& m = drawn_.mask;
    if (m.struct_size != sizeof(m) || m.seqlen_q > 4096 || m.seqlen_k > 4096) return;
    const bool has_vectors = m.bounds.dtype != FM_NONE && m.bounds.ndim == 4;
    fm_mask out = room_for(has_vectors ? m.bounds.shape[0] : 1, has_vectors ? m.bounds.shape[1] : 1, m.seqlen_k);
    judged(fm_mask_to_startend(mask_, copied(out)));
    fm_statistics sums{};
    sums.struct_size = sizeof(sums);
    sums.tile_rows = drawn_.null_struct;
    expect_taken(judged(fm_mask_statistics(mask_, &sums)));
    const std::size_t cells = static_cast<std::size_t>((m.seqlen_q + 99) / 100 * ((m.seqlen_k + 63) / 64));
    fm_cells counted{};
    counted.struct_size = sizeof(counted);
    counted.row_step = 100;
    counted.key_step = 64;
    counted.most_keys = drawn_.plan_header;
    counted.count = static_cast<int64_t>(cells);
    counted.visible = reinterpret_cast<int64_t*>(memory_.take(cells * 8));
    expect_taken(judged(fm_mask_count_cells(mask_, &counted)));
  }

  void of_attention() {
    fm_backward_args b = drawn_.args;
    b.mask = drawn_.has_mask ? mask_ : nullptr;
    if (drawn_.with_plan && drawn_.has_mask && plan_) b.plan = plan_, b.plan_bytes = plan_bytes_;
    fm_forward_args f{};
    f.struct_size = drawn_.args.struct_size == sizeof(b) ? sizeof(f) : drawn_.args.struct_size;
    f.reserved = b.reserved;
    f.q = b.q, f.k = b.k, f.v = b.v, f.out = b.out, f.lse = b.lse;
    f.mask = b.mask, f.plan = b.plan, f.plan_bytes = b.plan_bytes;
    f.dense_mask = b.dense_mask;
    const fm_forward_args* const forward = drawn_.null_struct == 4 ? nullptr : copied(f);
    const fm_backward_args* const backward = drawn_.null_struct == 4 ? nullptr : copied(b);
    call(forward, fm_forward_workspace, fm_forward);
    explain(forward, fm_explain);
    explain(backward, fm_explain_backward);
    call(backward, fm_backward_workspace, fm_backward);
    explain_json(forward, 0);
    explain_json(backward, 1);
  }

  /// True if the call may read all of its tensors and does not take long.
  bool can_run() const {
    const auto size = [](const fm_tensor& t, int d) { return static_cast<double>(std::max<int64_t>(t.shape[d], 1)); };
    const double work =
        size(drawn_.args.q, 0) * size(drawn_.args.q, 1) * size(drawn_.args.q, 2) * size(drawn_.args.k, 1);
    return on_host_ && work <= kMostWork &&
           std::all_of(drawn_.tensors.begin(), drawn_.tensors.end(),
                       [](const Argument& argument) { return argument.readable; });
  }

  template <typename Args>
  void call(const Args* args, fm_status (*query)(const Args*, const fm_options*, size_t*),
            fm_status (*compute)(const Args*, void*, size_t, const fm_options*)) {
    std::size_t bytes = 0;
    require(judged(query(args, options_, nullptr)) != FM_OK, "there is nowhere to write to");
    const fm_status shapes = judged(query(args, options_, &bytes));
    expect_taken(shapes);
    if (shapes != FM_OK) {
      char small[64];
      require(judged(compute(args, small, sizeof(small), options_)) != FM_OK,
              "a call whose shapes are wrong is refused");
      return;
    }
    if (!can_run() || bytes > 64 * kMostBytes) return;
    const std::size_t size = of_size(drawn_.workspace, bytes);
    char* const workspace = drawn_.workspace == Size::kNone ? nullptr : memory_.take(size, drawn_.null_struct % 8);
    const fm_status status = judged(compute(args, workspace, size, options_));
    expect_taken(status);
    const bool asks = drawn_.options.allocate && !workspace;
    require(status != FM_OK || size == bytes || asks, "a call does not do with less than it asked for");
  }

  template <typename Args>
  void explain(const Args* args, fm_status (*say)(const Args*, const fm_options*, char*, size_t, size_t*)) {
    if (!can_run()) return;
    const std::size_t capacity = drawn_.text == Size::kRight ? 4096 : drawn_.text == Size::kOneLess ? 9 : 0;
    char* const text = drawn_.null_struct == 5 ? nullptr : memory_.take(capacity);
    std::size_t length = 0;
    const fm_status status = judged(say(args, options_, text, capacity, drawn_.null_struct == 6 ? nullptr : &length));
    expect_taken(status);
    if (status == FM_OK && capacity > 0)
      require(std::memchr(text, '\0', capacity) != nullptr, "an explanation ends within the buffer");
  }

  void explain_json(const void* args, int is_backward) {
    // Tensors on a device are not read.
    if (on_host_ && !can_run()) return;
    const auto odd = static_cast<int32_t>(drawn_.null_struct);
    const fm_gpu_model gpu{sizeof(fm_gpu_model), 9 - odd % 3, odd / 3 % 2, 132 >> odd % 16};
    std::size_t length = 0;
    const auto json = [&](char* text, std::size_t capacity) {
      return judged(fm_explain_json(args, is_backward, options_, odd % 2 ? &gpu : nullptr, text, capacity, &length));
    };
    if (json(nullptr, 0) != FM_OK) return;
    char* const text = memory_.take(length + 1);
    require(json(text, length + 1) == FM_OK && std::strlen(text) == length, "an explanation is as long as it says");
    require(text[0] == '{' && text[length - 1] == '}', "an explanation is an object");
  }

  Drawn& drawn_;
  Memory memory_;
  fm_executed_tiles counted_{};
  fm_mask* mask_ = nullptr;
  fm_options* options_ = nullptr;
  bool mask_readable_ = true, on_host_ = true;
  char* plan_ = nullptr;
  std::size_t plan_bytes_ = 0;
};

void check(std::span<const uint8_t> input) {
  ByteReader bytes(input);
  Drawn drawn(bytes);
  Calls(bytes, drawn).run();
}

}  // namespace
}  // namespace flashmask::fuzz

// Ignores memory that LLVM's OpenMP keeps for its threads until the end.
extern "C" const char* __lsan_default_suppressions() { return "leak:libomp"; }

int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  flashmask::fuzz::check({data, size});
  return 0;
}
