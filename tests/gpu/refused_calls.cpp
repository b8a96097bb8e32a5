// SPDX-License-Identifier: Apache-2.0
// Calls that are wrong in one thing each, through the public interface: every one has to be refused with its code and a
// message that names what is wrong, and none may start anything on the device or write a byte. A program of its own, to
// be run under a memory checker, too.
//
// First with tensors in host memory; then, if there is a device, with tensors there and errors that exist only there.
// If the library runs other kernels, it has to say that it takes calls that Hopper's kernels alone refuse: these calls
// are named, and not made.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "flashmask/attention.h"
#include "flashmask/c_api.h"
#include "flashmask/plan.h"
#include "gpu/device_mask.h"
#include "gpu/kernel_cases.h"

namespace flashmask::test {
namespace {

constexpr int64_t kBatch = 2, kSeqlenQ = 130, kSeqlenK = 200, kHeads = 4, kHeadsKv = 2, kDim = 64;
constexpr int kUntouched = 0x5a;
constexpr Device kHost{};

/// Bytes in host or device memory.
class Memory {
 public:
  Memory(Device device, std::size_t size, int byte) : on_device_(device.kind == Device::Kind::kCuda) {
    if (on_device_) {
      there_ = std::make_unique<DeviceBytes>(size);
      there_->fill(byte);
    } else {
      here_.assign(size, static_cast<std::byte>(byte));
    }
  }
  std::byte* data() { return on_device_ ? there_->data() : here_.data(); }
  std::vector<std::byte> read() const { return on_device_ ? there_->read() : here_; }
  void copy_from(const std::vector<int32_t>& values) {
    if (on_device_) return there_->copy_from(values);
    std::memcpy(here_.data(), values.data(), 4 * values.size());
  }

 private:
  bool on_device_;
  std::vector<std::byte> here_;
  std::unique_ptr<DeviceBytes> there_;
};

/// A legal call of either direction, to be spoiled. Forward takes what it needs of `args`.
struct Call {
  BackwardArgs args;
  Options options;
  std::size_t workspace_bytes = 0;
};

/// Everything that a legal call reads and writes, in one device's memory.
class Bench {
 public:
  explicit Bench(Device device)
      : device_(device),
        inputs_(device, kBytes, 0),
        outputs_(device, kBytes, kUntouched),
        vectors_(device, 4 * kMostMasks * kSeqlenK, 0) {
    vectors_.copy_from(std::vector<int32_t>(kMostMasks * kSeqlenK, static_cast<int32_t>(kSeqlenQ + 1)));
  }

  Device device() const { return device_; }

  TensorView tensor(Memory& memory, int64_t slot, std::initializer_list<int64_t> shape,
                    DataType dtype = DataType::kBFloat16) {
    TensorView view = TensorView::contiguous(memory.data() + slot * kSlot, dtype, shape);
    view.device = device_;
    return view;
  }
  TensorView input(int64_t slot, std::initializer_list<int64_t> shape) { return tensor(inputs_, slot, shape); }
  TensorView output(int64_t slot, std::initializer_list<int64_t> shape, DataType dtype = DataType::kBFloat16) {
    return tensor(outputs_, slot, shape, dtype);
  }

  /// A causal mask with vectors that hide nothing: [batch, heads, kSeqlenK, 1], at most kMostMasks of them.
  Mask mask(int64_t batch = 1, int64_t heads = 1, int64_t seqlen_q = kSeqlenQ) {
    return from_startend_row_indices(tensor(vectors_, 0, {batch, heads, kSeqlenK, 1}, DataType::kInt32), true,
                                     seqlen_q);
  }

  Call legal() {
    Call call;
    call.args.q = input(0, {kBatch, kSeqlenQ, kHeads, kDim});
    call.args.k = input(1, {kBatch, kSeqlenK, kHeadsKv, kDim});
    call.args.v = input(2, {kBatch, kSeqlenK, kHeadsKv, kDim});
    call.args.dout = input(3, {kBatch, kSeqlenQ, kHeads, kDim});
    call.args.out = output(0, {kBatch, kSeqlenQ, kHeads, kDim});
    call.args.lse = output(1, {kBatch, kHeads, kSeqlenQ}, DataType::kFloat32);
    call.args.dq = output(2, {kBatch, kSeqlenQ, kHeads, kDim});
    call.args.dk = output(3, {kBatch, kSeqlenK, kHeadsKv, kDim});
    call.args.dv = output(4, {kBatch, kSeqlenK, kHeadsKv, kDim});
    call.args.mask = mask();
    if (device_.kind == Device::Kind::kCpu) call.options.backend = "reference";  // every build has it
    return call;
  }

  std::vector<std::byte> written() const { return outputs_.read(); }

 private:
  static constexpr int64_t kSlot = 4 * kBatch * kSeqlenK * kHeads * kDim;
  static constexpr std::size_t kBytes = 5 * kSlot;
  static constexpr std::size_t kMostMasks = 3;

  Device device_;
  Memory inputs_, outputs_, vectors_;
};

ForwardArgs forward_of(const BackwardArgs& args) {
  ForwardArgs forward;
  static_cast<AttentionInputs&>(forward) = args;
  forward.out = args.out;
  forward.lse = args.lse;
  return forward;
}

enum class Where { kEverywhere, kOnDevice, kOnHopper };  ///< kOnHopper: its kernels refuse what the others take
enum class Directions { kBoth, kForward, kBackward };

/// A change that spoils a legal call, and the error that must follow.
struct Refusal {
  const char* name;
  std::function<void(Bench&, Call&)> spoil;
  ErrorCode code;
  const char* says;
  Where where = Where::kEverywhere;
  Directions directions = Directions::kBoth;
};

using Tensors = std::vector<std::pair<const char*, TensorView BackwardArgs::*>>;

/// A refusal for each tensor of `arguments`: `spoil` is done to it.
void add_each(std::vector<Refusal>& refusals, const char* what, const Tensors& arguments,
              const std::function<void(TensorView&)>& spoil, ErrorCode code, Where where, Directions directions) {
  for (const auto& [name, tensor] : arguments) {
    const auto spoil_it = [tensor = tensor, spoil](Bench&, Call& call) { spoil(call.args.*tensor); };
    refusals.push_back({what, spoil_it, code, name, where, directions});
  }
}

Tensors inputs_and_out() {
  return {{"q", &BackwardArgs::q}, {"k", &BackwardArgs::k}, {"v", &BackwardArgs::v}, {"out", &BackwardArgs::out}};
}
Tensors gradients() {
  return {
      {"dout", &BackwardArgs::dout}, {"dq", &BackwardArgs::dq}, {"dk", &BackwardArgs::dk}, {"dv", &BackwardArgs::dv}};
}

void shapes(std::vector<Refusal>& refusals) {
  constexpr Where kEverywhere = Where::kEverywhere;
  constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;
  const auto every = [&](const char* what, const std::function<void(TensorView&)>& spoil) {
    add_each(refusals, what, inputs_and_out(), spoil, kInvalid, Where::kEverywhere, Directions::kBoth);
    add_each(refusals, what, gradients(), spoil, kInvalid, Where::kEverywhere, Directions::kBackward);
  };
  every("rank 3", [](TensorView& t) { t.rank = 3; });
  every("a negative size", [](TensorView& t) { t.shape[1] = -1; });
  every("a size of 2^62", [](TensorView& t) { t.shape[0] = int64_t{1} << 62; });
  every("dtype int32", [](TensorView& t) { t.dtype = DataType::kInt32; });
  every("no data", [](TensorView& t) { t.data = nullptr; });
  every("a negative stride", [](TensorView& t) { t.stride[1] = -8; });
  every("another device", [](TensorView& t) { t.device = t.device.kind == Device::Kind::kCpu ? kDevice : kHost; });
  const std::vector<Refusal> more{
      {"one row too few", [](Bench&, Call& c) { c.args.out.shape[1] -= 1; }, kInvalid, "out"},
      {"one key more in v than in k", [](Bench&, Call& c) { c.args.v.shape[1] += 1; }, kInvalid, "v"},
      {"heads that do not divide", [](Bench&, Call& c) { c.args.q.shape[2] = 3; }, kInvalid, "heads"},
      {"no heads", [](Bench&, Call& c) { c.args.q.shape[2] = c.args.k.shape[2] = c.args.v.shape[2] = 0; }, kInvalid,
       "heads"},
      {"2^33 keys", [](Bench&, Call& c) { c.args.k.shape[1] = c.args.v.shape[1] = int64_t{1} << 33; }, kInvalid,
       "seqlen_k"},
      {"head dim 512", [](Bench&, Call& c) { c.args.q.shape[3] = c.args.k.shape[3] = 512; }, ErrorCode::kUnsupported,
       "head_dim"},
      {"other head dims of q and k", [](Bench&, Call& c) { c.args.k.shape[3] = 32; }, kInvalid, "k"},
      {"k in another type", [](Bench&, Call& c) { c.args.k.dtype = DataType::kFloat16; }, kInvalid, "k"},
      {"lse in 16 bits", [](Bench&, Call& c) { c.args.lse.dtype = DataType::kBFloat16; }, kInvalid, "lse"},
      {"lse of other heads", [](Bench&, Call& c) { c.args.lse.shape[1] = kHeadsKv; }, kInvalid, "lse"},
      {"elements apart", [](Bench&, Call& c) { c.args.v.stride[3] = 2; }, kInvalid, "v"},
      {"an output that overlaps", [](Bench&, Call& c) { c.args.out.stride[1] = 0; }, kInvalid, "out", kEverywhere,
       Directions::kForward},
      {"a gradient that overlaps", [](Bench&, Call& c) { c.args.dk.stride[0] = 0; }, kInvalid, "dk", kEverywhere,
       Directions::kBackward},
      {"dlse of q's shape", [](Bench&, Call& c) { c.args.dlse = c.args.q; }, kInvalid, "dlse", kEverywhere,
       Directions::kBackward}};
  refusals.insert(refusals.end(), more.begin(), more.end());
}

void masks(std::vector<Refusal>& refusals) {
  constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;
  const auto with_plan = [](Bench& bench, Call& call, int64_t seqlen_q, Device device) {
    static const std::vector<uint64_t> never_read(1 << 12);
    if (bench.device().kind == Device::Kind::kCpu) {
      static const Plan plan(Mask({.seqlen_q = kSeqlenQ + 1, .seqlen_k = kSeqlenK}));
      call.args.plan = plan.view();
    } else {
      call.args.plan =
          PlanView::on_device(PlanLayout(seqlen_q, kSeqlenK, 1, 1), std::as_bytes(std::span(never_read)), device);
    }
  };
  const std::vector<Refusal> more{
      {"a mask of other lengths", [](Bench& b, Call& c) { c.args.mask = b.mask(1, 1, kSeqlenQ + 1); }, kInvalid,
       "mask"},
      {"a mask of three batch entries", [](Bench& b, Call& c) { c.args.mask = b.mask(3, 1); }, kInvalid, "mask"},
      {"a mask of three heads", [](Bench& b, Call& c) { c.args.mask = b.mask(1, 3); }, kInvalid, "mask"},
      {"a mask and a dense mask",
       [](Bench&, Call& c) {
         c.args.dense_mask = c.args.q;
         c.args.dense_mask.dtype = DataType::kUInt8;
       },
       kInvalid, "dense_mask"},
      {"a dense mask in 16 bits",
       [](Bench&, Call& c) {
         c.args.mask.reset();
         c.args.dense_mask = c.args.q;
       },
       kInvalid, "dense_mask"},
      {"a plan of other lengths", [=](Bench& b, Call& c) { with_plan(b, c, kSeqlenQ + 1, kDevice); }, kInvalid, "plan"},
      {"a plan on another device", [=](Bench& b, Call& c) { with_plan(b, c, kSeqlenQ, {Device::Kind::kCuda, 1}); },
       kInvalid, "plan", Where::kOnDevice},
      {"a mask in host memory",
       [](Bench&, Call& c) {
         c.args.mask = Mask({.seqlen_q = kSeqlenQ, .seqlen_k = kSeqlenK, .lts = std::vector<int32_t>(kSeqlenK, 1)});
       },
       kInvalid, "mask", Where::kOnDevice}};
  refusals.insert(refusals.end(), more.begin(), more.end());
}

void options(std::vector<Refusal>& refusals) {
  constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::vector<Refusal> more{
      {"threads below 0", [](Bench&, Call& c) { c.options.threads = -1; }, kInvalid, "threads"},
      {"CTAs below 0", [](Bench&, Call& c) { c.options.max_ctas = std::numeric_limits<int>::min(); }, kInvalid,
       "max_ctas"},
      {"a scale that is no number", [](Bench&, Call& c) { c.options.softmax_scale = std::nan(""); }, kInvalid,
       "softmax_scale"},
      {"an infinite scale", [=](Bench&, Call& c) { c.options.softmax_scale = -kInfinity; }, kInvalid, "softmax_scale"},
      {"a negative scale", [](Bench&, Call& c) { c.options.softmax_scale = -0.1; }, kInvalid, "softmax_scale"},
      {"an unknown backend", [](Bench&, Call& c) { c.options.backend = "opencl"; }, kInvalid, "opencl"},
      {"a workspace that is one byte short", [](Bench&, Call& c) { c.workspace_bytes -= 1; }, kInvalid, "workspace",
       Where::kOnDevice},
      {"no workspace", [](Bench&, Call& c) { c.workspace_bytes = 0; }, kInvalid, "workspace", Where::kOnDevice}};
  refusals.insert(refusals.end(), more.begin(), more.end());
}

/// All tensors of a call.
template <typename F>
void for_all_tensors(Call& call, F&& f) {
  BackwardArgs& a = call.args;
  for (TensorView* t : {&a.q, &a.k, &a.v, &a.out, &a.lse, &a.dout, &a.dq, &a.dk, &a.dv}) f(*t);
}

void on_device_alone(std::vector<Refusal>& refusals) {
  constexpr ErrorCode kUnsupported = ErrorCode::kUnsupported;
  const auto every = [&](const char* what, Where where, const std::function<void(TensorView&)>& spoil) {
    add_each(refusals, what, inputs_and_out(), spoil, kUnsupported, where, Directions::kBoth);
    add_each(refusals, what, gradients(), spoil, kUnsupported, where, Directions::kBackward);
  };
  every("an address 2 bytes off", Where::kOnDevice,
        [](TensorView& t) { t.data = static_cast<std::byte*>(t.data) + 2; });
  every("rows 4 elements off 16 bytes", Where::kOnDevice, [](TensorView& t) { t.stride[1] += 4; });
  every("a stride of 2^40", Where::kOnHopper, [](TensorView& t) { t.stride[0] = int64_t{1} << 40; });
  const std::vector<Refusal> more{
      {"float32", [](Bench&, Call& c) { for_all_tensors(c, [](TensorView& t) { t.dtype = DataType::kFloat32; }); },
       kUnsupported, "float32", Where::kOnDevice},
      {"an expanded q", [](Bench&, Call& c) { c.args.q.stride[0] = 0; }, kUnsupported, "q", Where::kOnHopper},
      {"the CPU's backend", [](Bench&, Call& c) { c.options.backend = "reference"; }, kUnsupported, "reference",
       Where::kOnDevice},
      {"a device that is not there",
       [](Bench&, Call& c) {
         for_all_tensors(c, [](TensorView& t) { t.device = {Device::Kind::kCuda, 99}; });
         c.args.mask.reset();
       },
       ErrorCode::kNoDevice, "99", Where::kOnDevice},
      {"partial results with softcap",
       [](Bench&, Call& c) {
         c.options.features.partial_out = true;
         c.options.features.softcap = 30;
         for (TensorView* t : {&c.args.out, &c.args.dq, &c.args.dk, &c.args.dv}) t->dtype = DataType::kFloat32;
       },
       kUnsupported, "partial_out", Where::kOnHopper}};
  refusals.insert(refusals.end(), more.begin(), more.end());
}

std::vector<Refusal> all_refusals() {
  std::vector<Refusal> refusals;
  shapes(refusals);
  masks(refusals);
  options(refusals);
  on_device_alone(refusals);
  return refusals;
}

// --- Running them ------------------------------------------------------------------------------------

struct Counts {
  int passed = 0, failed = 0;
};

void count(Counts& counts, const std::string& name, const std::string& wrong) {
  ++(wrong.empty() ? counts.passed : counts.failed);
  if (!wrong.empty()) std::printf("FAILED: %s: %s\n", name.c_str(), wrong.c_str());
}

/// Says how the refusal of `call` is wrong; empty if it is right.
template <typename F>
std::string refusal_problem(ErrorCode code, const std::string& says, F&& call) {
  try {
    call();
    return "it was taken";
  } catch (const Error& error) {
    const std::string text = error.what();
    const int got = static_cast<int>(error.code()), expected = static_cast<int>(code);
    if (got != expected) return "code " + std::to_string(got) + ", expected " + std::to_string(expected) + ": " + text;
    return text.find(says) == std::string::npos ? "the message does not name '" + says + "': " + text : "";
  } catch (const std::exception& error) {
    return std::string("not the library's error: ") + error.what();
  }
}

/// Names the error that a refused call left behind on the device; empty if none.
std::string device_problem(Device device) {
  if (device.kind == Device::Kind::kCpu) return "";
  const cudaError_t left = cudaGetLastError(), running = cudaDeviceSynchronize();
  if (left != cudaSuccess) return std::string("it left the error ") + cudaGetErrorString(left);
  return running == cudaSuccess ? "" : std::string("the device says ") + cudaGetErrorString(running);
}

void run(const Call& call, bool backward_too, Memory& workspace) {
  const std::span memory(workspace.data(), call.workspace_bytes);
  if (backward_too) {
    backward(call.args, memory, call.options);
  } else {
    forward(forward_of(call.args), memory, call.options);
  }
}

std::size_t workspace_of(const Call& call, bool is_backward) {
  return is_backward ? backward_workspace(call.args, call.options)
                     : forward_workspace(forward_of(call.args), call.options);
}

/// "device forward, an expanded q (q)".
std::string full_name(Device device, const Refusal& refusal, bool is_backward) {
  const std::string where = device.kind == Device::Kind::kCpu ? "host" : "device";
  return where + (is_backward ? " backward, " : " forward, ") + refusal.name + " (" + refusal.says + ")";
}

/// Does not make the call: one that Hopper refuses may read memory that is not there.
void expect_taken(Bench& bench, const Refusal& refusal, bool is_backward, Counts& counts) {
  Call call = bench.legal();
  refusal.spoil(bench, call);
  const Explanation found =
      is_backward ? explain(call.args, call.options) : explain(forward_of(call.args), call.options);
  const std::string name = full_name(bench.device(), refusal, is_backward);
  const bool taken = found.backend == "cuda";
  count(counts, name, taken ? "" : "it was refused: " + (found.rejected.empty() ? "" : found.rejected.front()));
  if (taken) std::printf("not made, as %s takes it: %s\n", found.instance.c_str(), name.c_str());
}

void refuse(Bench& bench, const Refusal& refusal, bool is_backward, Memory& workspace, Counts& counts) {
  Call call = bench.legal();
  call.workspace_bytes = workspace_of(call, is_backward);
  std::string wrong;
  try {
    refusal.spoil(bench, call);
    wrong = refusal_problem(refusal.code, refusal.says, [&] { run(call, is_backward, workspace); });
  } catch (const std::exception& error) {
    wrong = std::string("the call could not be made: ") + error.what();
  }
  if (wrong.empty()) wrong = device_problem(bench.device());
  count(counts, full_name(bench.device(), refusal, is_backward), wrong);
}

/// Plans in buffers that are too short, not there, not aligned, or elsewhere.
void refuse_plans(Bench& bench, Counts& counts) {
  constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;
  const Mask mask = bench.mask();
  const auto bytes = static_cast<std::size_t>(PlanLayout(kSeqlenQ, kSeqlenK, 1, 1).bytes);
  Memory buffer(bench.device(), bytes + 8, kUntouched);
  const auto build = [&](std::span<std::byte> memory, Device device) {
    return [=] { build_plan(mask.view(), memory, device); };
  };
  const Device elsewhere = bench.device().kind == Device::Kind::kCpu ? kDevice : kHost;
  const std::span whole(buffer.data(), bytes);
  count(counts, "plan in a short buffer",
        refusal_problem(kInvalid, "buffer", build(whole.first(bytes - 1), bench.device())));
  count(counts, "plan in no buffer", refusal_problem(kInvalid, "buffer", build({}, bench.device())));
  count(counts, "plan at an odd address",
        refusal_problem(kInvalid, "align", build({buffer.data() + 1, bytes}, bench.device())));
  count(counts, "plan elsewhere than its mask", refusal_problem(kInvalid, "mask", build(whole, elsewhere)));
  const std::vector<std::byte> after = buffer.read();
  for (const std::byte b : after) {
    if (b == std::byte{kUntouched}) continue;
    return count(counts, "plans that were refused", "something was written to their buffer");
  }
  count(counts, "plans that were refused", device_problem(bench.device()));
}

/// Refused calls that only the C interface can express.
void refuse_c_calls(Counts& counts) {
  struct CRefusal {
    const char* name;
    std::function<void(fm_forward_args&, fm_options&)> spoil;
    fm_status status;
    const char* says;
  };
  const CRefusal refusals[] = {
      {"args of size 0", [](fm_forward_args& a, fm_options&) { a.struct_size = 0; }, FM_INVALID_ARGUMENT,
       "struct_size"},
      {"options of 70000 bytes", [](fm_forward_args&, fm_options& o) { o.struct_size = 70000; }, FM_INVALID_ARGUMENT,
       "struct_size"},
      {"an unknown flag", [](fm_forward_args&, fm_options& o) { o.flags = 1u << 31; }, FM_UNSUPPORTED, "flags"},
      {"a softcap below 0", [](fm_forward_args&, fm_options& o) { o.softcap = -1; }, FM_INVALID_ARGUMENT, "softcap"},
      {"dropout of everything", [](fm_forward_args&, fm_options& o) { o.dropout_p = 1; }, FM_INVALID_ARGUMENT,
       "dropout_p"},
      {"device -1", [](fm_forward_args&, fm_options& o) { o.device = -1; }, FM_INVALID_ARGUMENT, "device"},
      {"a dtype of 99", [](fm_forward_args& a, fm_options&) { a.q.dtype = 99; }, FM_INVALID_ARGUMENT, "q"},
      {"a negative dtype", [](fm_forward_args& a, fm_options&) { a.lse.dtype = -3; }, FM_INVALID_ARGUMENT, "lse"},
      {"six dimensions", [](fm_forward_args& a, fm_options&) { a.k.ndim = 6; }, FM_INVALID_ARGUMENT, "k"},
      {"a reserved word", [](fm_forward_args& a, fm_options&) { a.reserved = 1; }, FM_UNSUPPORTED, "reserved"}};
  const auto tensor = [](int64_t heads, int64_t dim) {
    alignas(16) static char never_read[16];
    return fm_tensor{never_read, FM_BFLOAT16, 4, {1, 1, heads, dim, 0}, {heads * dim, heads * dim, dim, 1, 0}};
  };
  for (const CRefusal& refusal : refusals) {
    fm_forward_args args{};
    args.struct_size = sizeof(args);
    args.q = args.k = args.v = args.out = tensor(1, 64);
    args.lse = tensor(1, 1);
    args.lse.dtype = FM_FLOAT32;
    args.lse.ndim = 3;
    fm_options call_options{};
    call_options.struct_size = sizeof(call_options);
    refusal.spoil(args, call_options);
    std::size_t bytes = 0;
    const fm_status status = fm_forward_workspace(&args, &call_options, &bytes);
    const std::string text = fm_last_error();
    const bool good = status == refusal.status && text.find(refusal.says) != std::string::npos;
    count(counts, std::string("C, ") + refusal.name, good ? "" : "status " + std::to_string(status) + ": " + text);
  }
  count(counts, "C, no arguments",
        fm_forward(nullptr, nullptr, 0, nullptr) == FM_INVALID_ARGUMENT ? "" : "it was taken");
}

/// That nothing was written; and then that the call which all of them were made from is taken.
void check_legal(Bench& bench, Memory& workspace, Counts& counts) {
  bool untouched = true;
  for (const std::byte b : bench.written()) untouched &= b == std::byte{kUntouched};
  count(counts, "calls that were refused", untouched ? "" : "something was written to an output");
  for (const bool is_backward : {false, true}) {
    Call call = bench.legal();
    call.workspace_bytes = workspace_of(call, is_backward);
    std::string wrong;
    try {
      run(call, is_backward, workspace);
      wrong = device_problem(bench.device());
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    count(counts, is_backward ? "the legal backward" : "the legal forward", wrong);
  }
}

void refuse_all(Device device, Counts& counts) {
  Bench bench(device);
  const Call legal = bench.legal();
  Memory workspace(device, std::max(workspace_of(legal, false), workspace_of(legal, true)), kUntouched);
  for (const Refusal& refusal : all_refusals()) {
    if (refusal.where != Where::kEverywhere && device.kind == Device::Kind::kCpu) continue;
    const bool taken = refusal.where == Where::kOnHopper && !runs_hopper_kernels();
    for (const bool is_backward : {false, true}) {
      if (refusal.directions == (is_backward ? Directions::kForward : Directions::kBackward)) continue;
      if (taken) {
        expect_taken(bench, refusal, is_backward, counts);
      } else {
        refuse(bench, refusal, is_backward, workspace, counts);
      }
    }
  }
  refuse_plans(bench, counts);
  check_legal(bench, workspace, counts);
}

int run_refusals() {
  Counts counts;
  refuse_c_calls(counts);
  refuse_all(kHost, counts);
  const std::string missing = no_device();
  if (missing.empty()) refuse_all(kDevice, counts);
  std::printf("%d passed, %d failed\n", counts.passed, counts.failed);
  if (counts.failed > 0) return 1;
  if (missing.empty()) return 0;
  std::printf("skipped with tensors on a device: %s\n", missing.c_str());
  return 77;
}

}  // namespace
}  // namespace flashmask::test

int main(int count, char** words) {
  using namespace flashmask::test;
  const auto arguments = parse(count, words);
  if (!arguments) {
    std::fputs("gpu_refused_calls [--probe]\n  --probe  only allocates and clears some of the device's memory\n",
               stderr);
    return 2;
  }
  try {
    return arguments->probe ? probe() : run_refusals();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
