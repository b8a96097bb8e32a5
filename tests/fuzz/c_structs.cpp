// SPDX-License-Identifier: Apache-2.0

// The C interface's structs with any values in them: a right call is drawn, then some of its fields are changed, and
// every function returns a status. A tensor lies in memory of exactly the size that its shape and strides claim, or,
// where they claim too much, at an address that nothing is mapped at: such tensors go to functions that promise not to
// read, and into calls that have to be refused for their shapes and options alone.

#include "flashmask/c_api.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "fuzz/byte_reader.h"
#include "fuzz/check.h"

namespace flashmask::fuzz {
namespace {

constexpr std::size_t kMostBytes = std::size_t{1} << 20;
constexpr double kMostWork = 4e5;  ///< elements of the score matrices

// --- Memory ----------------------------------------------------------------------------------------

/// Buffers of exactly their size, so that a sanitizer sees what is read or written past them.
class Memory {
 public:
  char* take(std::size_t bytes, std::size_t misalignment = 0) {
    return buffers_.emplace_back(std::make_unique<char[]>(bytes + misalignment)).get() + misalignment;
  }
  /// A copy of what begins at `from` in a buffer of `bytes`: all of it, less, or with zeros after it.
  template <typename Struct>
  Struct* copy(const Struct& from, std::size_t bytes) {
    char* to = take(bytes);
    std::memcpy(to, &from, std::min(bytes, sizeof(Struct)));
    return reinterpret_cast<Struct*>(to);
  }

 private:
  std::vector<std::unique_ptr<char[]>> buffers_;
};

/// The bytes before and after a tensor's first element that it claims; nothing if they are too many.
struct Claim {
  std::size_t before = 0, after = 0;
};

std::size_t size_of(int32_t dtype) {
  constexpr std::size_t kSizes[] = {0, 4, 8, 2, 2, 4, 1, 1};
  return dtype >= FM_NONE && dtype <= FM_UINT8 ? kSizes[dtype] : 0;
}

std::optional<Claim> claim_of(const fm_tensor& t) {
  const std::size_t element = size_of(t.dtype);
  if (element == 0 || t.ndim < 0 || t.ndim > 5) return Claim{};  // never read
  // In floating point, which does not overflow and is exact where the claim is small.
  double before = 0, after = static_cast<double>(element), elements = 1;
  for (int d = 0; d < t.ndim; ++d) {
    if (t.shape[d] <= 0) return Claim{};
    const double stride = static_cast<double>(t.stride[d]),
                 reach = static_cast<double>(t.shape[d] - 1) * static_cast<double>(element);
    (stride < 0 ? before : after) += reach * std::abs(stride);
    elements *= static_cast<double>(t.shape[d]);
  }
  if (std::max({before, after, elements}) > static_cast<double>(kMostBytes)) return std::nullopt;
  return Claim{static_cast<std::size_t>(before), static_cast<std::size_t>(after)};
}

// --- What is drawn ---------------------------------------------------------------------------------

/// A tensor of the call: where it is in which struct, and what is wrong with its pointer.
struct Argument {
  fm_tensor* tensor;
  uint8_t null = 0, misaligned = 0;
  bool readable = true;
};

/// Sizes of structs, buffers and such: the right one, unless it is changed.
enum class Size : uint8_t { kRight, kOneLess, kNone, kCount };

struct Drawn {
  fm_mask mask{};
  fm_options options{};
  fm_backward_args args{};  ///< of both directions
  fm_tensor visible{};
  std::vector<Argument> tensors;
  int64_t backend = 0;
  bool has_mask = true, with_plan = false, null_options = false, count = false;
  Size plan = Size::kRight, workspace = Size::kRight, text = Size::kRight;
  uint8_t null_struct = 0, plan_header = 0;
  int changes = 0;

  bool readable(const fm_tensor& t) const {
    return std::find_if(tensors.begin(), tensors.end(), [&](const Argument& a) { return a.tensor == &t; })->readable;
  }
};

void lay_out(fm_tensor& t, int32_t dtype, std::initializer_list<int64_t> shape, uint8_t layout = 0) {
  t.dtype = dtype;
  t.ndim = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape);
  uint64_t stride = 1;  // sizes may have been changed to anything
  for (int d = t.ndim - 1; d >= 0; --d) {
    t.stride[d] = static_cast<int64_t>(stride);
    stride *= static_cast<uint64_t>(std::max<int64_t>(t.shape[d], 1));
    if (d == t.ndim - 1 && layout == 1) stride += 3;  // rows with something after them
  }
  if (layout == 2 && t.ndim == 4) {  // [batch, heads, seqlen, head_dim] underneath
    t.stride[1] = t.shape[3];
    t.stride[2] = t.shape[3] * std::max<int64_t>(t.shape[1], 1);
  }
}

int64_t draw_length(ByteReader& bytes) {
  const uint8_t length = bytes.byte();
  return length < 160 ? length % 20 : length;
}

void draw_mask(ByteReader& bytes, Drawn& drawn, std::array<int64_t, 2> batches, std::array<int64_t, 3> heads) {
  fm_mask& m = drawn.mask;
  m.struct_size = sizeof(m);
  const uint8_t kind = bytes.byte(), form = bytes.byte();
  drawn.has_mask = kind % 8 != 0;
  if (kind & 16) m.flags |= FM_HAS_Q_OFFSET, m.q_offset = bytes.byte() - 128;
  if (kind & 32)
    m.flags |= FM_HAS_WINDOW, m.window_left = bytes.byte() % 64 - 1, m.window_right = bytes.byte() % 64 - 1;
  if (form & 1) m.flags |= FM_CAUSAL;
  const int64_t vectors = (form & 1 ? 1 : 2) * (form & 2 ? 2 : 1);
  if (kind & 64) lay_out(m.bounds, FM_INT32, {bytes.one_of(batches), bytes.one_of(heads), m.seqlen_k, vectors});
  constexpr int64_t kDtypes[] = {FM_BOOL, FM_UINT8, FM_INT32};
  const int64_t rows = (m.seqlen_q + 127) / 128, keys = (m.seqlen_k + 127) / 128;
  if (kind & 128)
    lay_out(m.block_mask, static_cast<int32_t>(bytes.one_of(kDtypes)),
            {bytes.one_of(batches), bytes.one_of(heads), rows, keys});
  const auto batch = [](const fm_tensor& t) { return t.dtype && t.shape[2] && t.shape[3] ? t.shape[0] : 1; };
  const auto head = [](const fm_tensor& t) { return t.dtype && t.shape[2] && t.shape[3] ? t.shape[1] : 1; };
  lay_out(drawn.visible, form & 4 ? FM_BOOL : FM_UINT8,
          {std::max(batch(m.bounds), batch(m.block_mask)), std::max(head(m.bounds), head(m.block_mask)), m.seqlen_q,
           m.seqlen_k});
}

constexpr uint64_t kDropoutState[2] = {1, 2};

void draw_options(ByteReader& bytes, Drawn& drawn) {
  fm_options& o = drawn.options;
  o.struct_size = sizeof(o);
  const uint8_t kind = bytes.byte();
  constexpr int64_t kThreads[] = {1, 1, 2, 3, 100000, 0};
  o.threads = static_cast<int32_t>(bytes.one_of(kThreads));
  if (kind & 1) o.flags |= FM_DETERMINISTIC;
  if (kind & 2) o.flags |= FM_HAS_SCALE, o.softmax_scale = bytes.byte() / 64.0 - 1;
  drawn.null_options = kind % 16 == 8 && drawn.args.q.dtype != FM_FLOAT64;
  if (kind & 16 && !drawn.null_options) {
    lay_out(o.sink, FM_FLOAT32, {drawn.args.q.shape[2]});
    drawn.args.dsink = o.sink;
  }
  if (kind & 32) o.softcap = 2.5;
  if (kind & 8 && !drawn.null_options) o.dropout_p = 0.3, o.dropout_state = kDropoutState;
  drawn.count = kind & 4;
  drawn.backend = drawn.args.q.dtype == FM_FLOAT64 ? 3 : kind / 64;
}

/// A call that every function takes.
void draw_right(ByteReader& bytes, Drawn& drawn) {
  const uint8_t sizes = bytes.byte(), kind = bytes.byte();
  const int64_t batch = 1 + (sizes & 1), heads_kv = 1 + (sizes >> 1 & 1), heads_q = heads_kv * (1 + (sizes >> 2 & 1));
  const int64_t dim = 1 + (sizes >> 3 & 7), dim_v = 1 + (sizes >> 6 & 3);
  const int64_t rows = draw_length(bytes), keys = draw_length(bytes);
  constexpr int32_t kDtypes[] = {FM_FLOAT32, FM_BFLOAT16, FM_FLOAT16, FM_FLOAT64};
  const int32_t dtype = kDtypes[kind & 3], of_lse = dtype == FM_FLOAT64 ? FM_FLOAT64 : FM_FLOAT32;
  fm_backward_args& a = drawn.args;
  a.struct_size = sizeof(a);
  const uint8_t layout = kind >> 2 & 3;
  lay_out(a.q, dtype, {batch, rows, heads_q, dim}, layout);
  lay_out(a.k, dtype, {batch, keys, heads_kv, dim}, layout);
  lay_out(a.v, dtype, {batch, keys, heads_kv, dim_v}, layout);
  lay_out(a.out, dtype, {batch, rows, heads_q, dim_v}, layout);
  lay_out(a.lse, of_lse, {batch, heads_q, rows});
  a.dout = a.out;
  if (kind & 16) std::fill(a.dout.stride, a.dout.stride + 4, 0);  // expanded
  if (kind & 32) a.dlse = a.lse;
  a.dq = a.q;
  a.dk = a.k;
  a.dv = a.v;
  drawn.mask.seqlen_q = rows;
  drawn.mask.seqlen_k = keys;
  draw_mask(bytes, drawn, {1, batch}, {1, heads_kv, heads_q});
  if (kind & 64 && !drawn.has_mask) lay_out(a.dense_mask, FM_BOOL, {1, heads_q, rows, keys});
  drawn.with_plan = kind & 128;
  draw_options(bytes, drawn);
  for (fm_tensor* t : {&a.q, &a.k, &a.v, &a.out, &a.lse, &a.dout, &a.dlse, &a.dq, &a.dk, &a.dv, &a.dense_mask,
                       &drawn.visible, &drawn.mask.bounds, &drawn.mask.block_mask, &drawn.mask.q_pos, &drawn.mask.k_pos,
                       &drawn.options.sink, &a.dsink})
    drawn.tensors.push_back({t});
}

// --- What is changed -------------------------------------------------------------------------------

/// A number that is wrong somewhere: small, around a limit, or any.
int64_t draw_wrong(ByteReader& bytes) {
  constexpr int64_t k62 = int64_t{1} << 62, k31 = int64_t{1} << 31;
  constexpr int64_t kOdd[] = {0, 1, -1, 2, 3, 127, 129, 257, k31 - 1, k31, k62, k62 + 1, 300'000'000, 65536, -k31, 8};
  const uint8_t kind = bytes.byte();
  return kind < 128 ? kOdd[kind % 16] : kind < 192 ? bytes.position() : bytes.byte();
}

void change_tensor(ByteReader& bytes, Drawn& drawn) {
  Argument& argument = drawn.tensors[bytes.byte() % drawn.tensors.size()];
  fm_tensor& t = *argument.tensor;
  const uint8_t field = bytes.byte() % 16;
  if (field < 5) {
    t.shape[field] = draw_wrong(bytes);
  } else if (field < 10) {
    t.stride[field - 5] = draw_wrong(bytes);
  } else if (field == 10) {
    t.dtype = static_cast<int32_t>(draw_wrong(bytes));
  } else if (field == 11) {
    t.ndim = static_cast<int32_t>(draw_wrong(bytes));
  } else if (field == 12) {
    argument.null = 1;
  } else if (field == 13) {
    argument.misaligned = bytes.byte() % 8;
  } else if (field == 14) {
    t = *drawn.tensors[bytes.byte() % drawn.tensors.size()].tensor;
  } else {
    t.dtype = bytes.byte() % 8;
  }
}

/// Multiples of 8, so that no pointer is cut in two; some are larger than the struct.
uint32_t draw_struct_size(ByteReader& bytes, std::size_t right) {
  constexpr int64_t kOdd[] = {0, 4, 8, 65536, 65544, UINT32_MAX, 7};
  const uint8_t kind = bytes.byte();
  if (kind < 32) return static_cast<uint32_t>(kOdd[kind % 7]);
  return kind < 64 ? static_cast<uint32_t>(right + kind % 4 * 8) : kind % (static_cast<uint32_t>(right) / 8 + 1) * 8;
}

void change_mask(ByteReader& bytes, Drawn& drawn) {
  fm_mask& m = drawn.mask;
  int64_t* const numbers[] = {&m.seqlen_q, &m.seqlen_k, &m.q_offset, &m.window_left, &m.window_right};
  const uint8_t field = bytes.byte() % 10;
  if (field < 5) {
    *numbers[field] = draw_wrong(bytes);
  } else if (field == 5) {
    m.flags = bytes.byte();
  } else if (field == 6) {
    m.struct_size = draw_struct_size(bytes, sizeof(m));
  } else if (field == 7) {
    m.flags ^= FM_CAUSAL;
  } else if (field == 8) {
    lay_out(m.q_pos, FM_INT32, {1, m.seqlen_q});
  } else {
    lay_out(m.k_pos, FM_INT32, {1, m.seqlen_k});
  }
}

void change_options(ByteReader& bytes, Drawn& drawn) {
  fm_options& o = drawn.options;
  const uint8_t field = bytes.byte() % 16;
  constexpr int64_t kDevices[] = {1, -1, 2, INT32_MAX, INT32_MIN};
  switch (field) {
    case 0:
      o.threads = static_cast<int32_t>(draw_wrong(bytes));
      break;
    case 1:
      o.device = static_cast<int32_t>(bytes.one_of(kDevices));
      break;
    case 2:
      o.flags = bytes.byte();
      break;
    case 3: {
      const int64_t bits = bytes.wide();
      std::memcpy(&o.softmax_scale, &bits, sizeof(bits));
      break;
    }
    case 4:
      o.max_ctas = static_cast<int32_t>(draw_wrong(bytes));
      break;
    case 5:
      o.partial_out = bytes.byte();
      break;
    case 6:
      lay_out(o.sink, FM_FLOAT32, {drawn.args.q.shape[2]});
      break;
    case 7:
      o.dropout_p = bytes.byte() / 128.0;
      break;
    case 8:
      o.stream = &o;  // never used on the CPU
      break;
    case 9:
      o.struct_size = draw_struct_size(bytes, sizeof(o));
      break;
    case 10: {
      const int64_t bits = bytes.wide();
      std::memcpy(&o.softcap, &bits, sizeof(bits));
      break;
    }
    case 11:
      o.dropout_state = o.dropout_state ? nullptr : kDropoutState;
      break;
    case 12:
      o.allocate = [](void*, std::size_t) -> void* { return nullptr; };
      break;
    case 13:
      o.allocate_context = &o;
      break;
    case 14:
      o.kernels = "sm90";
      break;
    default:
      drawn.backend = bytes.byte() % 8;
  }
}

void change_call(ByteReader& bytes, Drawn& drawn) {
  const uint8_t field = bytes.byte() % 9, value = bytes.byte();
  const auto size = static_cast<Size>(value % static_cast<uint8_t>(Size::kCount));
  switch (field) {
    case 0:
      drawn.args.struct_size = draw_struct_size(bytes, sizeof(drawn.args));
      break;
    case 1:
      drawn.args.reserved = value;
      break;
    case 2:
      drawn.plan = size;
      break;
    case 3:
      drawn.workspace = size;
      break;
    case 4:
      drawn.text = size;
      break;
    case 5:
      drawn.null_struct = value;
      break;
    case 6:
      drawn.plan_header = value;
      break;
    case 7:
      lay_out(drawn.args.dsink, FM_FLOAT32, {drawn.args.q.shape[2]});
      break;
    default:
      lay_out(drawn.args.dense_mask, FM_BOOL, {1, 1, drawn.mask.seqlen_q, drawn.mask.seqlen_k});
  }
}

void change(ByteReader& bytes, Drawn& drawn) {
  const uint8_t what = bytes.byte() % 8;
  ++drawn.changes;
  if (what < 4) return change_tensor(bytes, drawn);
  if (what < 6) return change_mask(bytes, drawn);
  return what == 6 ? change_options(bytes, drawn) : change_call(bytes, drawn);
}

// --- The calls -------------------------------------------------------------------------------------

/// Every function returns a status and, if it failed, a message.
fm_status judged(fm_status status) {
  require(status >= FM_OK && status < FM_INTERNAL,
          "a function returns one of the statuses, and never that of a defect");
  require(status == FM_OK || fm_last_error()[0] != '\0', "a function that fails says why");
  return status;
}

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
    static char* const nowhere = reinterpret_cast<char*>(std::uintptr_t{0x10000});
    fm_tensor& t = *argument.tensor;
    const std::optional<Claim> claim = claim_of(t);
    argument.readable = claim.has_value();
    char* data = nowhere;
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

  /// That every function takes what was drawn, as long as nothing was changed.
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
    // The header alone: what follows it is taken for what fm_plan_build wrote.
    if (!drawn_.plan_header) return;
    plan[drawn_.plan_header % 48] = static_cast<char>(plan[drawn_.plan_header % 48] ^ drawn_.plan_header);
    require(judged(fm_plan_validate(mask_, plan, size, nullptr, 0, options_)) != FM_OK, "a changed plan is another's");
  }

  void to_dense(bool shapes_fit) {
    const fm_mask& m = drawn_.mask;
    const fm_tensor& v = drawn_.visible;
    // A mask that is cut short has other lengths. More entries or heads than a mask that may be read can have are
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

  /// Whether the call may read all of its tensors, and takes no long time.
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
    // What is on a device is not read there.
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
  const uint8_t changes = bytes.byte();
  Drawn drawn;
  draw_right(bytes, drawn);
  for (int n = 0; n < changes % 8; ++n) change(bytes, drawn);
  Calls(bytes, drawn).run();
}

}  // namespace
}  // namespace flashmask::fuzz

// What LLVM's OpenMP keeps of its threads until the end is no leak of ours.
extern "C" const char* __lsan_default_suppressions() { return "leak:libomp"; }

int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  flashmask::fuzz::check({data, size});
  return 0;
}
