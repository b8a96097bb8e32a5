// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "flashmask/export.h"
#include "flashmask/mask.h"
#include "flashmask/plan.h"
#include "flashmask/tensor.h"

namespace flashmask {

/// How many tiles a call executed, summed over batch entries and query heads. A tile is a granule of the plan on the
/// cpu backend, and Explanation::tile on the cuda backend, whose backward is one pass that counts as both.
struct ExecutedTiles {
  int64_t forward = 0;
  int64_t backward_rows = 0;  ///< by the pass over query rows (dq)
  int64_t backward_keys = 0;  ///< by the pass over key blocks (dk, dv)
};

/// Attention weights set to zero at random, the others scaled by 1 / (1 - p). lse is that of all weights.
///
/// Which are kept depends on the state, the batch entry, the query head, the row and the key alone, not on the
/// backend, the tiles or the mask: Philox4x32-7 (Salmon et al., SC 2011) gives each weight 16 bits, so p is rounded
/// to a multiple of 2^-16, at most 65535 / 65536. docs/features.md says which bits.
struct Dropout {
  double p = 0;  ///< the share set to zero, in [0, 1)
  /// {seed, offset} of the random numbers, 8-byte aligned, on the call's device, where they are read while the work
  /// runs: a CUDA graph draws new ones in each replay. A backward takes its forward's. Needed if p > 0, not read
  /// otherwise.
  const uint64_t* state = nullptr;
  /// Places of the call's rows and keys in a longer sequence of which it is a part, so that it drops what a call of the
  /// whole would: int32 [1 or batch, ceil(seqlen / 16)] on the call's device. Rows 16 n to 16 n + 15 of the call are
  /// rows 16 x to 16 x + 15 of the sequence, with x the n-th number, at least 0. Undefined: the call's own indices.
  /// Like first_head, not read if p is 0.
  TensorView q_origin{}, k_origin{};
  int64_t first_head = 0;  ///< likewise, the call's first query head among all
};
/// Writes which weights a call with this dropout keeps: kept is bool or uint8 [batch, heads_q, seqlen_q, seqlen_k] in
/// host memory, of any strides, 1 = kept. The state and the origins are read there, too.
FLASHMASK_API void dropout_mask(const Dropout& dropout, const TensorView& kept);

/// Features beyond the softmax of masked scores; none by default. A feature that a set of kernels does not implement is
/// refused (kUnsupported) by name.
struct Features {
  /// Scores become softcap * tanh(score / softcap), after softmax_scale and before the mask (Gemma 2,
  /// arXiv:2408.00118); 0: as they are. Otherwise between 1e-18 and 256.
  double softcap = 0;
  /// [heads_q], float32 or q's dtype: the score of one more key, whose value is zero, that every row sees (gpt-oss,
  /// arXiv:2508.10925). It is neither scaled nor capped. lse includes it: a row that sees nothing else has out = 0 and
  /// lse = sink. Undefined, or -inf: none.
  TensorView sink{};
  Dropout dropout{};
  /// [heads_q] or [batch, heads_q], float32: slopes of ALiBi (arXiv:2108.12409). Scores, after softcap, are lowered by
  /// slope * |row - key|, where a row stands at its index + q_offset, or both at the mask's positions. The slopes have
  /// no gradient. Undefined: none.
  TensorView alibi_slopes{};
  /// Results are parts of sums that the caller goes on adding up (attention over disjoint sets of keys): out and, in a
  /// backward, dq, dk and dv are float32 (float64 for float64) whatever q's dtype, and not rounded in between. A
  /// backward's out is that of all keys together, as its lse is, in float32 or, like dq then, in q's dtype. dout keeps
  /// q's dtype.
  bool partial_out = false;
  /// The forward adds up a row's keys in splits, which lie at multiples of this many keys from the first, in ascending
  /// order, as cached_forward does: with that call's split_size a row has the bits that it has there, however many rows
  /// either call has (docs/inference.md). A multiple of 128; 0: none. The backward reads out and lse and is the same.
  /// The cpu backend takes it, without dropout.
  int64_t split_size = 0;
};
/// Names of the features asked for: "softcap", "dropout", "split_size", "sink", "alibi_slopes", "partial_out".
FLASHMASK_API std::vector<std::string> names(const Features& features);

/// How a call is to be run. Everything has a default.
struct Options {
  /// Scores are q.k times this; default 1 / sqrt(head_dim). Finite and at least 0.
  std::optional<double> softmax_scale{};
  /// Gives equal bits in every run, as forward and the cpu and reference backends always do. On a GPU dq is then
  /// summed up in integers: their unit follows the largest key and value of a head, and a row of dq with a NaN or an
  /// infinity is NaN throughout (docs/decisions/dq-in-integers.md).
  bool deterministic = false;
  /// CPU threads, at most; 0 is OpenMP's default. No more are used than there are tiles of 64 rows or 128 keys to hand
  /// out, nor more than 1024 (or the machine's processors, if it has more), and the workspace is for as many. The
  /// result does not depend on it. A process that was forked off one whose calls used several has one: OpenMP's threads
  /// do not survive a fork.
  int threads = 0;
  /// CTAs of a CUDA call's attention kernel that run at a time: at most this many, so that the other multiprocessors
  /// are left to work of other streams (communication, say); 0 is as many as the device has multiprocessors. Kernels
  /// over single rows that run before and after it do not count. Forward and deterministic backward give the same
  /// bits with any number. Ignored on the CPU.
  int max_ctas = 0;
  Features features{};
  /// cudaStream_t of a CUDA call; must be null on the CPU.
  void* stream = nullptr;
  /// "auto", or a backend's name. "auto" obeys the environment variable FLASHMASK_BACKEND, and never
  /// chooses the reference.
  std::string backend = "auto";
  /// Kernels of a CUDA call by the architecture they are written for, as KernelInfo::arch names it, or "auto": the
  /// first that run on the device, of "sm90", "sm80" and "sm86", which are those of sm80's tiles that need at most 99
  /// KiB of shared memory. "auto" obeys the environment variable FLASHMASK_KERNELS. The CPU takes "auto" alone.
  std::string kernels = "auto";
  /// Most bytes that the mask's interval lists and the plan that the call makes of them may take; a call that needs
  /// more is refused (kUnsupported) before it asks for memory. 0: what the environment variable
  /// FLASHMASK_MAX_MASK_BYTES says, or else a quarter of the memory of the tensors' device, on the CPU of the
  /// machine's. Masks without lists have no such limit.
  int64_t max_mask_bytes = 0;
  /// Debug: where to add up the executed tiles; null counts nothing. To read the count, a call on a CUDA device waits
  /// for the stream; with features.split_size it refuses to count.
  ExecutedTiles* executed_tiles = nullptr;
};

/// Inputs of both directions. Shapes (any strides, last dimension contiguous):
///   q [batch, seqlen_q, heads_q, head_dim], k [batch, seqlen_k, heads_kv, head_dim],
///   v [batch, seqlen_k, heads_kv, head_dim_v], one dtype: float32, bfloat16 or float16 (float64: the
///   reference backend only); heads_q % heads_kv == 0; 1 <= head_dim, head_dim_v <= 256.
struct AttentionInputs {
  TensorView q, k, v;
  /// Mask batch must be 1 or `batch`, mask heads 1, heads_kv or heads_q; its contents, if it has any, must be on the
  /// tensors' device. Absent: every row sees every key.
  std::optional<Mask> mask{};
  /// The plan of exactly this mask (Plan::view(), or PlanView::on_device), where the tensors are; undefined: the
  /// call makes one in its workspace.
  PlanView plan{};
  /// Baseline mode: bool or uint8 [1 or batch, 1 or heads_q or heads_kv, seqlen_q, seqlen_k], of any strides, nonzero =
  /// visible, in place of `mask`. Every tile is executed as a partial one, with the same arithmetic as the
  /// masked run, so that results can be compared bit for bit.
  TensorView dense_mask{};
};

/// Longest wait for keys that arrive, in seconds.
inline constexpr double kMostArrivalTimeout = 1e6;
/// Keys and values that a stream is still bringing, in pieces, while a forward runs: kernels wait for a piece before
/// they read what it brings. Results are those of the same call with all keys there, bit for bit. sm90's kernels take
/// it; other backends refuse it.
struct Arrivals {
  /// int32 [1 or batch, ceil(seqlen_k / 128)], contiguous: how many pieces have to have arrived before the keys and
  /// values of each 128 may be read; 0: they are there when the call begins.
  TensorView needed{};
  /// int32 [2]: how many pieces have arrived, which grows while the call runs, each time after a piece is there
  /// (fm_transfers_enqueue in c_api.h); and 0, or after the call the first piece that it did not wait for any longer.
  /// Then out and lse are numbers without meaning.
  TensorView state{};
  /// Seconds that a wait may take, above 0 and up to kMostArrivalTimeout.
  double timeout = 60;
  bool defined() const { return needed.defined() || state.defined(); }
};

/// out [batch, seqlen_q, heads_q, head_dim_v] in q's dtype (float32 with partial_out); lse [batch, heads_q, seqlen_q],
/// natural log, float32 (float64 for float64): log(sum_j exp(softmax_scale * q_i.k_j)) over the visible keys j, and the
/// sink. Rows that see nothing get out = 0 and lse = -inf, or the sink. Every element of both is written.
struct ForwardArgs : AttentionInputs {
  TensorView out, lse;
  Arrivals arrivals{};
};

/// Keys whose gradients a backward has before the others', so that they can leave under its rest: the last of the
/// call's. sm90's kernels take it, with partial_out; other backends refuse it.
struct EarlyKeys {
  /// Their gradients, [batch, early keys, heads_kv, head_dim or head_dim_v]; BackwardArgs::dk and dv are of the keys
  /// before them alone, whose number has to be a multiple of 128.
  TensorView dk{}, dv{};
  void* event = nullptr;   ///< cudaEvent_t, which is recorded when they are there
  void* stream = nullptr;  ///< cudaStream_t, of a higher priority than the call's, that computes them beside the others
  bool defined() const { return dk.defined() || dv.defined(); }
};

/// Gradients of a forward call with the same inputs: `out` and `lse` are what it returned; dout has out's
/// shape, q's dtype and any strides (expanded ones too); dlse, optional, has lse's shape and dtype; dq, dk,
/// dv have the shapes and dtype of q, k, v; dsink, optional, has the shape and dtype of Features::sink, without which
/// it is absent, and the same bits in every run. Every element of them is written.
struct BackwardArgs : AttentionInputs {
  TensorView out, lse, dout;
  TensorView dlse{};
  TensorView dq, dk, dv;
  TensorView dsink{};
  EarlyKeys early{};
};

/// Bytes of workspace the call needs: from shapes and options alone, tensor data is not read and may be null.
FLASHMASK_API std::size_t forward_workspace(const ForwardArgs& args, const Options& options = {});
FLASHMASK_API std::size_t backward_workspace(const BackwardArgs& args, const Options& options = {});

/// Masked attention (FlashMask, algorithm 1) and its gradients (algorithm 2). `workspace` needs no
/// initialisation and no alignment; it is in the memory of the tensors' device. Throws Error before anything is
/// written if an argument is wrong. On a CUDA device the work is put on Options::stream and the call returns
/// without waiting for it; the workspace has to stay until the work is done.
FLASHMASK_API void forward(const ForwardArgs& args, std::span<std::byte> workspace, const Options& options = {});
FLASHMASK_API void backward(const BackwardArgs& args, std::span<std::byte> workspace, const Options& options = {});

/// A backend of this build, and whether this machine can run it.
struct BackendInfo {
  std::string name;
  bool usable = false;
  std::string detail;  ///< SIMD target and threads, device, or why it is not usable
};
FLASHMASK_API std::vector<BackendInfo> backends();

/// A compiled GPU kernel.
struct KernelInfo {
  /// Its purpose, "sm90.fwd.bf16.d128.dv128.c3": architecture, direction, element type, head_dim, head_dim_v,
  /// consumer warpgroups, or kilobytes of shared memory, "sm80.fwd.bf16.d128.dv128.k163"; the features
  /// that it takes follow, ".score.dropout.sink.pos"; helpers of a backward have its id and a word more, a sink's
  /// gradient is "sm90.bwd.bf16.dsink", a plan's are "sm90.plan.classify" and so on. It stays what it is when code is
  /// renamed or moved.
  std::string id{};
  std::string arch{};                 ///< architecture it was compiled for, "sm90"
  std::string symbol{};               ///< its entry in the library's device code
  std::string op{};                   ///< "fwd", "bwd" or "plan"
  DataType dtype = DataType::kNone;   ///< element type of q, k and v; kNone: any, or none is read
  int head_dim = 0, head_dim_v = 0;   ///< 0 in a kernel of a plan or of a sink's gradient
  TileShape tile{0, 0};               ///< query rows and keys at a time; 0: not in tiles of them
  int threads = 0, shared_bytes = 0;  ///< per block; shared_bytes: dynamic, as launched
};
/// Every GPU kernel in this build, whatever this machine can run; empty in a build without CUDA. The one list of what
/// is supported: a backend takes the element types that it has kernels of, and head dims up to those of a kernel
/// (multiples of 8, see Explanation::padding_share).
FLASHMASK_API std::vector<KernelInfo> kernels();
/// {"kernels": [{"id", "arch", "symbol", "op", "dtype", "head_dim", "head_dim_v", "tile": {"rows", "keys"}, "threads",
/// "shared_bytes"}, ...]}; dtype is null where there is none.
FLASHMASK_API std::string to_json(const std::vector<KernelInfo>& kernels);

/// GPU properties that decide how a call runs.
struct GpuModel {
  int compute_major = 9, compute_minor = 0;  ///< compute capability
  int multiprocessors = 132;
};

/// Which backend and configuration a call would take, and why.
struct Explanation {
  std::string backend;        ///< empty: none takes the call
  std::string reason;         ///< why this one (forced by what, or first in the order that takes the call)
  std::string configuration;  ///< tile, SIMD target, threads
  /// Names of the Features that the call asks for, whether or not a backend takes it.
  std::vector<std::string> features;
  std::string arch;      ///< the GPU kernels' architecture, "sm90"; empty on a CPU
  std::string instance;  ///< id of the attention kernel that runs, see KernelInfo; empty on a CPU
  /// Ids of all kernels that run, in order, those of a plan made in the call first.
  std::vector<std::string> kernels;
  TileShape tile{};
  /// Share of the work in executed tiles on columns past head_dim and head_dim_v: 0 if the instance has the call's own.
  double padding_share = 0;
  /// Counts of `tile`s over batch entries and query heads. live_tiles: -1 if the mask is on a device, which explain()
  /// does not read.
  int64_t live_tiles = 0, tiles = 0;
  std::size_t workspace_bytes = 0;
  /// One line for each backend that was passed over: "cpu: float64 is ...".
  std::vector<std::string> rejected;
};
/// Describes the call without running it; throws only on arguments that no backend could ever take.
///
/// With `gpu`, a call on CUDA tensors is described as that GPU would run it; none need be there.
FLASHMASK_API Explanation explain(const ForwardArgs& args, const Options& options = {},
                                  const std::optional<GpuModel>& gpu = {});
FLASHMASK_API Explanation explain(const BackwardArgs& args, const Options& options = {},
                                  const std::optional<GpuModel>& gpu = {});
/// For people: some lines of text, which may change.
FLASHMASK_API std::string to_string(const Explanation& explanation);
/// For programs: an object with Explanation's members as they are called there, `tile` as {"rows", "keys"}, and
/// live_tiles null where it is not known. A backend that takes the call is a string, none is null.
FLASHMASK_API std::string to_json(const Explanation& explanation);

}  // namespace flashmask
