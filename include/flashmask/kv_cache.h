// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "flashmask/attention.h"
#include "flashmask/export.h"
#include "flashmask/tensor.h"

// Attention over a KV cache. A request is a sequence whose keys are tokens 0 .. n - 1, where n is the request's number
// in KvCacheView::seqlens: the call's own tokens are counted, and already in the cache. Row i of its m rows is the
// sequence's row n - m + i; a row below 0 sees nothing. docs/inference.md has it in a picture.
//
// Lengths, tables, masks and positions are read where the tensors are, while the work runs. No value of them makes a
// call read or write outside the tensors: n is clamped to what the tables hold, keys of a page that is not there are
// zeros under no vectors, and slots from n on are not read. validate_cached finds such values.

namespace flashmask {

/// Keys per split of a sequence unless a call says otherwise.
inline constexpr int64_t kDefaultSplitSize = 1024;
/// The most rows and keys of a tail.
inline constexpr int64_t kMaxTail = 128;
/// A row that no sequence reaches: in a column's vectors, for good.
inline constexpr int32_t kForGood = INT32_MAX;

/// Keys and values of a batch of sequences, in pages or contiguous. Any strides of at least 0; the last dimension of k
/// and v is contiguous. The layout "HND" is this one with other strides.
struct KvCacheView {
  /// [pages, page_size, heads_kv, head_dim] and [pages, page_size, heads_kv, head_dim_v], any page_size; without tables
  /// [batch, keys, heads_kv, ..]. q's dtype, or float8_e4m3, for which uint8 stands, too.
  TensorView k, v;
  /// int32 [batch, max_pages]: the page of a sequence's n-th page_size keys.
  TensorView page_table{};
  /// A table whose rows have lengths of their own: int32 [batch + 1] and [entries], request b's row being indices
  /// [indptr[b], indptr[b + 1]). Both or neither, and not beside page_table.
  TensorView page_indptr{}, page_indices{};
  /// int32 [batch]: n of each request; undefined: as many keys as it has room for.
  TensorView seqlens{};
  /// float32, of up to three dimensions that broadcast to [pages, page_size, heads_kv]: what a float8 element is
  /// multiplied by. Undefined: 1. Only with float8.
  TensorView k_scale{}, v_scale{};
};

/// How what a mask has for each key lies.
enum class KeyLayout : int32_t {
  kSequences = 0,  ///< by batch entry and key
  kPages = 1,      ///< beside the keys, through the same table
};

/// A mask over sequences: which keys a row sees. All tensors int32 but block_mask, on the call's device.
struct SequenceMaskView {
  /// The band: keys at a row's position or before, and a window around it, -1 unbounded; see Band. A key's position is
  /// its index, and a row's the index of its own key.
  bool causal = true;
  int64_t window_left = -1, window_right = -1;
  /// Hides column j from the rows [LTS[j], LTE[j]) and [UTS[j], UTE[j]) of the *sequence*; kForGood: to its end,
  /// however long it becomes. The vectors are those of startend_row_indices: 1 (LTS) or 2 (LTS, LTE) with causal, 2
  /// (LTS, UTE) or 4 (LTS, LTE, UTS, UTE) without; a missing start is row 0, a missing end kForGood. kSequences: [1 or
  /// batch, 1 or heads_kv, columns, vectors], where keys past the columns see the band alone; kPages: [pages,
  /// page_size, 1 or heads_kv, vectors].
  TensorView bounds{};
  /// Layout of bounds and of k_pos.
  KeyLayout key_layout = KeyLayout::kSequences;
  /// [batch, T, ceil(T / 32)], T <= kMaxTail: among the last L rows and keys of a sequence the bits stand for the
  /// band's upper edge: row t sees key u if bit u % 32 of word u / 32 is set. L is tail_lens (its limits 0 and n), or
  /// without it as many as T, the request's rows and n allow.
  TensorView tail{};
  TensorView tail_lens{};  ///< [batch]
  /// [batch, T]: in the tail the position of row t and of key t is n - L + depth[t].
  TensorView tail_depth{};
  /// Positions of the call's rows, of q's first dimensions, and of keys: kSequences [1 or batch, columns], where keys
  /// past the columns have their index; kPages [pages, page_size]. k_pos needs q_pos; beside a tail both are needed, or
  /// tail_depth, which excludes them.
  TensorView q_pos{}, k_pos{};
  /// bool or uint8 [1 or batch, 1 or heads_kv, row blocks, key blocks]: the sequence's row r sees key j only where the
  /// element of row block r / 128 and key block j / 128 is not 0 (kBlockMaskSize). One row block stands for all rows;
  /// blocks past the last hide nothing. Keys of a hidden block are not read.
  TensorView block_mask{};
};

/// The largest call that a plan has room for.
struct CachedCapacities {
  int64_t max_batch = 0;  ///< requests
  int64_t max_rows = 0;   ///< rows of all requests together
  int64_t max_keys = 0;   ///< keys of a request
  int64_t heads_q = 0, heads_kv = 0, head_dim = 0, head_dim_v = 0;
  int64_t max_total_keys = 0;  ///< keys of all requests together, which bounds the scratch; 0: max_batch * max_keys
  bool batch_invariant = false;
  int64_t split_size = kDefaultSplitSize;
  bool float8 = false;  ///< the cache is float8_e4m3: devices may have other kernels for it
  /// Calls are of one request, whose keys are the distinct pages of max_batch sequences, in a table, and whose rows are
  /// theirs: neighbours that see the same keys. Devices read a key for as many rows at once as see it. Without
  /// batch_invariant.
  bool forest = false;
};

/// Work that calls of one mask and cache share: done once, for all layers of a model. It holds their scratch, too. The
/// object is the host's part, the buffer lies with the tensors. It belongs to one stream at a time. When contents of
/// the mask, lengths or tables have changed, build it again: a call with a stale plan is undefined, though it reads and
/// writes nothing outside the tensors.
struct CachedPlan {
  CachedCapacities capacities{};
  std::span<std::byte> buffer{};
  Device device{};
  /// Digests of the shapes, addresses and options of the last build, which a call is compared with.
  std::array<uint64_t, 16> built_for{};
};

/// A call. q is [batch, m, heads_q, head_dim], or [rows, heads_q, head_dim] with cu_seqlens_q, int32 [batch + 1], where
/// request b has the rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]); rows of no request are not written. float32, bfloat16
/// or float16 (float64: the reference backend); heads_q % heads_kv == 0; 1 <= head_dim, head_dim_v <= 256.
struct CachedForwardArgs {
  TensorView q;
  TensorView out;    ///< q's dimensions but the last, which is head_dim_v; q's dtype
  TensorView lse{};  ///< optional: [batch, heads_q, m], or [heads_q, rows] where q is packed; float32 (float64)
  TensorView cu_seqlens_q{};
  KvCacheView cache;
  SequenceMaskView mask{};
  const CachedPlan* plan = nullptr;  ///< null: the call makes its own in its workspace
  /// Gives a request's rows the same bits whatever else is in the batch. The cpu and reference backends always do; cuda
  /// keeps results of all splits in the scratch for it, and its bits depend on how many rows the request has.
  bool batch_invariant = false;
  /// Keys of a sequence from one split to the next, a multiple of 128. Results are sums of splits in ascending order.
  int64_t split_size = kDefaultSplitSize;
};

/// Bytes of workspace the call needs: from shapes and options alone.
FLASHMASK_API std::size_t cached_forward_workspace(const CachedForwardArgs& args, const Options& options = {});

/// Attention of the rows over their sequences' keys, under the mask. Rows that see nothing get out = 0 and lse = -inf,
/// or the sink. Takes the features that options.def lists for caches; ALiBi's slopes are times the distance of
/// positions. Throws Error before anything is written if an argument is wrong.
FLASHMASK_API void cached_forward(const CachedForwardArgs& args, std::span<std::byte> workspace,
                                  const Options& options = {});

/// Bytes of a plan's buffer on the device, from its capacities alone.
FLASHMASK_API std::size_t cached_plan_bytes(const CachedCapacities& capacities, const Device& device);
/// Fills the plan for calls with these tensors: q, out and lse may differ from call to call and be absent here, but
/// without cu_seqlens_q a plan on a device is for q's number of rows (q may lack data; absent: one row a request);
/// cu_seqlens_q, mask, and the cache but for k, v and scales may not differ. Nothing is read back. Throws if the plan
/// has no room for them.
FLASHMASK_API void build_cached_plan(const CachedForwardArgs& args, CachedPlan& plan, const Options& options = {});

/// New tokens for a cache.
struct AppendArgs {
  TensorView k, v;  ///< [batch, m, heads_kv, ..], or [rows, heads_kv, ..] with cu_seqlens or slots; float32 or 16-bit
  TensorView cu_seqlens{};  ///< int32 [batch + 1]
  /// int32 or int64 [rows] or [batch, m]: page * page_size + slot of each row; -1, and what is no slot, is skipped.
  /// Undefined: row i of m becomes token n - m + i, seqlens being advanced already.
  TensorView slots{};
  /// int32 [.., 1 or heads_kv, vectors], k's first dimensions: each row's vectors, for the bounds of `mask`.
  TensorView bounds{};
  KvCacheView cache;
  SequenceMaskView mask{};
  /// Writes the cache's scales, too, which have to be there, each of a token or of a page, and of a head or of all. A
  /// token's scale is the largest magnitude of its numbers over 448, the largest of e4m3; 1 for zeros. A page's is the
  /// least power of two, from 2^-126 on, that brings no finite number of the page beyond 448. A call that writes a
  /// page's first slot begins its scale anew, as one does that finds no positive number there; any other only doubles
  /// it as often as its tokens need, and halves the numbers that the page holds as often. So in one call one request at
  /// most may append to a page.
  bool write_scales = false;
};
/// Writes rows into the cache: in the cache's dtype, rounded to nearest even; float8 after division by the scales, the
/// largest magnitude for all beyond it. NaN stays NaN, and does not count for a scale.
FLASHMASK_API void append_kv(const AppendArgs& args, const Options& options = {});

/// Throws kInvalidArgument naming the first request and value that a call would clamp, or read as zeros: lengths,
/// pages, cu_seqlens_q and tail_lens. Reads host memory; of k, v and q the shapes alone.
FLASHMASK_API void validate_cached(const CachedForwardArgs& args);

/// Which backend and kernel a call would take.
struct CachedExplanation {
  std::string backend;  ///< empty: none takes the call
  std::string kernel;
  std::string splits;       ///< how a sequence is divided
  std::string pages;        ///< how keys are found
  int64_t bytes_read = -1;  ///< from k and v, under the mask; -1: lengths are on a device
  std::size_t workspace_bytes = 0;
  std::vector<std::string> rejected;  ///< one line for each backend that does not take the call
};
FLASHMASK_API CachedExplanation explain_cached(const CachedForwardArgs& args, const Options& options = {});
/// An object with the members as they are called; bytes_read null where it is not known.
FLASHMASK_API std::string to_json(const CachedExplanation& explanation);

}  // namespace flashmask
