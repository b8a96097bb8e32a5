// SPDX-License-Identifier: Apache-2.0
#include "fuzz/drawn_call.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace flashmask::fuzz {

namespace {

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
  if (kind & 2) o.flags |= FM_HAS_SCALE, o.softmax_scale = bytes.byte() / 64.0;
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
  const uint8_t field = bytes.byte() % 18;
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
    case 15:
      o.split_size = bytes.byte() % 2 ? 128 : draw_wrong(bytes);
      break;
    case 16:
      o.max_mask_bytes = draw_wrong(bytes);
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
  if (what < 4) return change_tensor(bytes, drawn.tensors);
  if (what < 6) return change_mask(bytes, drawn);
  return what == 6 ? change_options(bytes, drawn) : change_call(bytes, drawn);
}

}  // namespace

Drawn::Drawn(ByteReader& bytes) {
  const int wrong = bytes.byte() % 8;
  draw_right(bytes, *this);
  for (int n = 0; n < wrong; ++n) change(bytes, *this);
}

}  // namespace flashmask::fuzz
