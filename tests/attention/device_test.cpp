// SPDX-License-Identifier: Apache-2.0
// CUDA as the library reports it without a CUDA device, and calls whose parts are in different places.
#include <gtest/gtest.h>

#include <algorithm>

#include "flashmask/attention.h"
#include "flashmask/builders.h"
#include "support/expect_error.h"
#include "support/scoped_variable.h"

namespace flashmask::test {
namespace {

constexpr Device kDevice{Device::Kind::kCuda, 0};
constexpr const char* kVariable = "FLASHMASK_KERNELS";

BackendInfo cuda_info() { return backends().front(); }

/// True if this build has attention kernels of an architecture.
bool has_kernels_of(const std::string& arch) {
  const std::vector<KernelInfo> all = kernels();
  return std::ranges::any_of(all, [&](const KernelInfo& kernel) { return kernel.op == "fwd" && kernel.arch == arch; });
}

/// A tensor that lies nowhere: nothing may touch it.
TensorView device_tensor(std::initializer_list<int64_t> shape, DataType dtype = DataType::kBFloat16) {
  TensorView t = TensorView::contiguous(reinterpret_cast<const void*>(uintptr_t{0x10000}), dtype, shape);
  t.device = kDevice;
  return t;
}

ForwardArgs device_call(DataType dtype = DataType::kBFloat16) {
  ForwardArgs args;
  args.q = args.k = args.v = args.out = device_tensor({1, 256, 2, 64}, dtype);
  args.lse = device_tensor({1, 2, 256}, DataType::kFloat32);
  args.mask = masks::causal(256, 256);
  return args;
}

Mask device_mask() { return from_startend_row_indices(device_tensor({1, 1, 256, 1}, DataType::kInt32), true, 256); }

class WithoutDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_info().usable) GTEST_SKIP() << "there is a CUDA device here: " << cuda_info().detail;
  }
};

TEST(Cuda, IsListedFirstAndSaysWhatItIs) {
  const BackendInfo info = cuda_info();
  EXPECT_EQ(info.name, "cuda");
  EXPECT_FALSE(info.detail.empty());
}

TEST_F(WithoutDevice, AutoNamesTheReasons) {
  expect_error(ErrorCode::kNoDevice,
               {"no backend takes this call", "cuda: ", cuda_info().detail, "cpu: takes CPU tensors only"},
               [] { forward_workspace(device_call()); });
  expect_error(ErrorCode::kNoDevice, {cuda_info().detail}, [] { forward(device_call(), {}); });
  const Explanation why = explain(device_call());
  EXPECT_TRUE(why.backend.empty());
  ASSERT_FALSE(why.rejected.empty());
  EXPECT_EQ(why.rejected.front(), "cuda: " + cuda_info().detail);
}

TEST_F(WithoutDevice, TheForcedChoiceIsKnown) {
  Options options;
  options.backend = "cuda";
  expect_error(ErrorCode::kNoDevice, {"cuda", cuda_info().detail}, [&] { forward_workspace(device_call(), options); });
}

TEST_F(WithoutDevice, ForcedOnCpuTensors) {
  ForwardArgs args = device_call(DataType::kFloat32);
  for (TensorView* t : {&args.q, &args.k, &args.v, &args.out, &args.lse}) t->device = {};
  Options options;
  options.backend = "cuda";
  expect_error(ErrorCode::kNoDevice, {"cuda: "}, [&] { forward_workspace(args, options); });
  EXPECT_EQ(explain(args).backend, "cpu");
}

/// mma.sync's forward picks, of two tiles, the one that puts most warps on a multiprocessor, then most CTAs. A Hopper's
/// shared memory holds two CTAs of four warps at head_dim 256, an A100's one; at 192 both hold two. An RTX 3090's holds
/// two at neither.
TEST(Cuda, TilesOfMmaSyncFillAMultiprocessor) {
  if (!has_kernels_of("sm80")) GTEST_SKIP() << "a build without the kernels of mma.sync";
  const GpuModel hopper{}, a100{.compute_major = 8, .compute_minor = 0, .multiprocessors = 108}, rtx3090{8, 6, 82};
  const auto rows = [](int64_t head_dim, const GpuModel& gpu, const std::string& set) {
    ForwardArgs args = device_call();
    for (TensorView* t : {&args.q, &args.k, &args.v, &args.out}) {
      *t = TensorView::contiguous(t->data, t->dtype, {1, 256, 2, head_dim});
      t->device = kDevice;
    }
    return explain(args, {.kernels = set}, gpu).tile.rows;
  };
  EXPECT_EQ(rows(256, hopper, "sm80"), 64);
  EXPECT_EQ(rows(256, a100, "sm80"), 128);
  EXPECT_EQ(rows(256, rtx3090, "sm86"), 64);
  EXPECT_EQ(rows(192, hopper, "sm80"), 64);
  EXPECT_EQ(rows(192, a100, "sm80"), 64);
  EXPECT_EQ(rows(192, rtx3090, "sm86"), 128);
  EXPECT_EQ(rows(128, hopper, "sm80"), 128);
  EXPECT_EQ(rows(128, a100, "sm80"), 128);
}

TEST(Cuda, AGpuThatIsNotThereCanBeAskedAbout) {
  if (!has_kernels_of("sm90")) GTEST_SKIP() << "a build without Hopper's kernels";
  const ScopedVariable variable(kVariable, nullptr);  // this is about calls for which nothing names kernels
  const Explanation hopper = explain(device_call(), {}, GpuModel{});
  EXPECT_EQ(hopper.backend, "cuda");
  EXPECT_EQ(hopper.arch, "sm90");
  ASSERT_FALSE(hopper.kernels.empty());
  EXPECT_EQ(hopper.kernels.back(), hopper.instance);
  const std::vector<KernelInfo> all = kernels();
  for (const std::string& id : hopper.kernels) {
    EXPECT_TRUE(std::any_of(all.begin(), all.end(), [&](const KernelInfo& k) { return k.id == id; })) << id;
  }
  const GpuModel a100{.compute_major = 8, .compute_minor = 0, .multiprocessors = 108}, rtx3090{8, 6, 82};
  if (has_kernels_of("sm80")) {
    EXPECT_EQ(explain(device_call(), {}, a100).instance, explain(device_call(), {.kernels = "sm80"}, a100).instance);
    EXPECT_EQ(explain(device_call(), {}, a100).arch, "sm80");
    EXPECT_EQ(explain(device_call(), {}, rtx3090).instance,
              explain(device_call(), {.kernels = "sm86"}, rtx3090).instance);
    EXPECT_EQ(explain(device_call(), {}, rtx3090).arch, "sm80");
  } else {
    EXPECT_TRUE(explain(device_call(), {}, a100).backend.empty());
  }
  const Explanation volta = explain(device_call(), {}, GpuModel{.compute_major = 7, .multiprocessors = 80});
  EXPECT_TRUE(volta.backend.empty());
  ASSERT_FALSE(volta.rejected.empty());
  EXPECT_NE(volta.rejected.front().find("has compute capability 7.0; the kernels need 9.0"), std::string::npos)
      << volta.rejected.front();
}

TEST(Cuda, TilesAreCountedIn32Bits) {
  if (kernels().empty()) GTEST_SKIP() << "a build without CUDA";
  const ScopedVariable variable(kVariable, nullptr);
  BackwardArgs args;
  args.q = args.k = args.v = args.out = args.dout = args.dq = args.dk = args.dv =
      device_tensor({1 << 17, 2048, 1 << 10, 64});
  args.lse = device_tensor({1 << 17, 1 << 10, 2048}, DataType::kFloat32);
  args.mask = masks::causal(2048, 2048);
  ForwardArgs forward = device_call();
  forward.q = forward.k = forward.v = forward.out = args.q;
  forward.lse = args.lse;
  forward.mask = args.mask;
  for (const auto& [set, gpu] :
       {std::pair{"sm90", GpuModel{}}, {"sm80", GpuModel{.compute_major = 8, .multiprocessors = 108}}}) {
    if (!has_kernels_of(set)) continue;
    const auto expect_refused = [](const Explanation& why, const std::string& text) {
      ASSERT_FALSE(why.rejected.empty());
      EXPECT_NE(why.rejected.front().find(text), std::string::npos) << why.rejected.front();
      EXPECT_NE(why.rejected.front().find("at most 1073741824"), std::string::npos) << why.rejected.front();
    };
    expect_refused(explain(args, {}, gpu), "batch * heads_q * seqlen_q / 128 is about 2147483648");
    expect_refused(explain(forward, {}, gpu), "batch * heads_q * seqlen_q / 128 is 2147483648");
  }
}

TEST(Cuda, SplitsRunInKernelsOverCaches) {
  if (kernels().empty()) GTEST_SKIP() << "a build without CUDA";
  const auto explained = [](const ForwardArgs& args, const Features& features, const GpuModel& gpu) {
    return explain(args, {.features = features}, gpu);
  };
  const ForwardArgs args = device_call();
  const Explanation hopper = explained(args, {.split_size = 128}, GpuModel{});
  EXPECT_EQ(hopper.backend, "cuda");
  EXPECT_TRUE(hopper.instance.starts_with("sm90.decode.")) << hopper.instance;
  EXPECT_NE(hopper.configuration.find("splits of 128"), std::string::npos) << hopper.configuration;
  const auto expect_refused = [&](const Explanation& why, const std::string& text) {
    EXPECT_TRUE(why.backend.empty());
    ASSERT_FALSE(why.rejected.empty());
    EXPECT_NE(why.rejected.front().find(text), std::string::npos) << why.rejected.front();
  };
  expect_refused(explained(args, {.split_size = 128}, GpuModel{.compute_major = 8, .multiprocessors = 108}),
                 "split_size is 128; kernels 'sm80' do not take it");
  expect_refused(explained(args, {.dropout = {.p = 0.5}, .split_size = 128}, GpuModel{}), "dropout 0.5");
  ForwardArgs partial = args;
  partial.out.dtype = DataType::kFloat32;
  expect_refused(explained(partial, {.partial_out = true, .split_size = 128}, GpuModel{}), "partial_out is set");
  ExecutedTiles executed;
  expect_refused(explain(args, {.features = {.split_size = 128}, .executed_tiles = &executed}, GpuModel{}),
                 "executed_tiles is set; on a GPU tiles are not counted");
}

TEST(Cuda, HopperAloneTakesKeysThatArrive) {
  if (kernels().empty()) GTEST_SKIP() << "a build without CUDA";
  ForwardArgs args = device_call();
  const int64_t blocks = (args.k.shape[1] + 127) / 128;
  const auto on_device = [&](std::initializer_list<int64_t> shape) {
    TensorView view = TensorView::contiguous(nullptr, DataType::kInt32, shape);
    view.device = args.q.device;
    return view;
  };
  args.arrivals = {.needed = on_device({1, blocks}), .state = on_device({2})};
  EXPECT_EQ(explain(args, {}, GpuModel{}).arch, "sm90");
  const auto expect_refused = [&](const Options& options, const GpuModel& gpu) {
    const Explanation why = explain(args, options, gpu);
    EXPECT_TRUE(why.backend.empty());
    ASSERT_FALSE(why.rejected.empty());
    EXPECT_NE(why.rejected.front().find("sm90's kernels take them"), std::string::npos) << why.rejected.front();
  };
  expect_refused({}, GpuModel{.compute_major = 8, .multiprocessors = 108});
  expect_refused({.features = {.split_size = 128}}, GpuModel{});
}

TEST(Cuda, FeaturesHaveKernelsOfTheirOwn) {
  if (kernels().empty()) GTEST_SKIP() << "a build without CUDA";
  const ForwardArgs args = device_call();
  TensorView sink = args.lse;
  sink.rank = 1;
  sink.shape[0] = 2;
  const auto expect_kernel = [&](const std::string& arch, const Features& features, const char* ending) {
    const Explanation taken = explain(args, {.features = features, .kernels = arch}, GpuModel{});
    EXPECT_EQ(taken.backend, "cuda") << arch;
    EXPECT_EQ(taken.arch, arch);
    EXPECT_EQ(taken.features, names(features));
    EXPECT_TRUE(taken.instance.ends_with(ending)) << taken.instance;
  };
  for (const char* arch : {"sm90", "sm80"}) {
    if (!has_kernels_of(arch)) continue;
    expect_kernel(arch, {.softcap = 30}, ".score.dropout.sink.pos");
    expect_kernel(arch, {.dropout = {.p = 0.1}}, ".score.dropout.sink.pos");
    expect_kernel(arch, {.softcap = 30, .sink = sink}, ".score.dropout.sink.pos");
    expect_kernel(arch, {.alibi_slopes = sink}, ".score.dropout.sink.pos");
  }
  if (has_kernels_of("sm90")) expect_kernel("sm90", {.sink = sink}, ".sink.pos");
  // Sinks and what changes the loop over tiles share one kernel of mma.sync.
  if (has_kernels_of("sm80")) expect_kernel("sm80", {.sink = sink}, ".score.dropout.sink.pos");
}

TEST(Cuda, KernelsAreAskedForByName) {
  if (!has_kernels_of("sm90") || !has_kernels_of("sm80")) GTEST_SKIP() << "a build without both architectures' kernels";
  Options options;
  options.kernels = "sm90";
  const Explanation asked = explain(device_call(), options, GpuModel{});
  EXPECT_EQ(asked.backend, "cuda");
  EXPECT_EQ(asked.arch, "sm90");
  const Explanation ampere =
      explain(device_call(), options, GpuModel{.compute_major = 8, .compute_minor = 0, .multiprocessors = 108});
  EXPECT_TRUE(ampere.backend.empty());
  options.kernels = "sm80";
  const GpuModel a100{.compute_major = 8, .compute_minor = 0, .multiprocessors = 108}, rtx3090{8, 6, 82};
  EXPECT_EQ(explain(device_call(), options, a100).arch, "sm80");
  EXPECT_EQ(explain(device_call(), options, GpuModel{}).arch, "sm80");
  EXPECT_TRUE(explain(device_call(), options, rtx3090).backend.empty());
  options.kernels = "sm86";
  EXPECT_EQ(explain(device_call(), options, rtx3090).arch, "sm80");
  options.kernels = "sm10";
  expect_invalid({"kernels 'sm10'", "Options::kernels", "known: auto, sm90"},
                 [&] { explain(device_call(), options, GpuModel{}); });
  options.kernels = "auto";
  const ScopedVariable variable(kVariable, "sm11");
  expect_invalid({"kernels 'sm11'", "FLASHMASK_KERNELS", "known: auto, sm90"},
                 [&] { explain(device_call(), options, GpuModel{}); });
  options.kernels = "sm90";  // which the argument decides
  EXPECT_EQ(explain(device_call(), options, GpuModel{}).arch, "sm90");
}

TEST(Kernels, AreNotTheCpus) {
  ForwardArgs args = device_call(DataType::kFloat32);
  for (TensorView* t : {&args.q, &args.k, &args.v, &args.out, &args.lse}) t->device = {};
  Options options;
  options.kernels = "sm90";
  expect_error(ErrorCode::kUnsupported, {"cpu: kernels must be 'auto'", "reference: kernels must be 'auto'"},
               [&] { forward_workspace(args, options); });
}

TEST_F(WithoutDevice, PlansAreRefused) {
  const Mask mask = masks::causal(256, 256);
  std::vector<uint64_t> words(static_cast<std::size_t>(PlanLayout(256, 256, 1, 1).bytes / 8));
  const auto buffer = std::as_writable_bytes(std::span(words));
  expect_error(ErrorCode::kNoDevice, {}, [&] { build_plan(mask.view(), buffer, kDevice); });
  expect_error(ErrorCode::kNoDevice, {}, [&] { build_plan(device_mask().view(), buffer, kDevice); });
  const PlanView plan = PlanView::on_device(PlanLayout(256, 256, 1, 1), buffer, kDevice);
  expect_error(ErrorCode::kNoDevice, {}, [&] { validate_plan(device_mask(), plan, buffer); });
}

TEST(DevicePlan, BuildChecksItsArguments) {
  const Mask mask = masks::causal(256, 256);
  const PlanLayout layout(256, 256, 1, 1);
  std::vector<uint64_t> words(static_cast<std::size_t>(layout.bytes / 8) + 1);
  const auto buffer = std::as_writable_bytes(std::span(words));
  const Mask host({.seqlen_q = 256, .seqlen_k = 256, .lts = std::vector<int32_t>(256, 9)});
  expect_invalid({"vectors are on the CPU", "CUDA device 0", "copy"},
                 [&] { build_plan(host.view(), buffer, kDevice); });
  expect_invalid({"vectors are on CUDA device 0", "the CPU"},
                 [&] { build_plan(device_mask().view(), buffer, Device{}); });
  expect_invalid({"plan buffer has 8 bytes"}, [&] { build_plan(mask.view(), buffer.first(8), kDevice); });
  expect_invalid({"plan buffer", "aligned"}, [&] { build_plan(host.view(), buffer.subspan(4), Device{}); });
  int stream = 0;
  expect_invalid({"stream must be null"}, [&] { build_plan(host.view(), buffer, Device{}, &stream); });
  EXPECT_NO_THROW(build_plan(host.view(), buffer, Device{}));
  EXPECT_EQ(PlanView(buffer).mask_hash(), host.view().content_hash);
  expect_invalid({"layout is of batch 1, heads 1, seqlen_q 128", "the mask has 1, 1, 256 and 256"},
                 [&] { build_plan(host.view(), PlanLayout(128, 256, 1, 1), buffer, Device{}); });
  expect_invalid({"layout has bit tiles", "interval lists"},
                 [&] { build_plan(mask.view(), PlanLayout(256, 256, 1, 1, 1), buffer, kDevice); });
  const PlanLayout runs(256, 256, 1, 1, kNoBits, PlanForm::kRuns);
  std::vector<uint64_t> of_runs(static_cast<std::size_t>(runs.bytes / 8));
  build_plan(host.view(), runs, std::as_writable_bytes(std::span(of_runs)), Device{});
  EXPECT_EQ(PlanView(std::as_bytes(std::span(of_runs))).layout(), runs);
}

TEST(DevicePlan, IsNotReadOnTheHost) {
  const PlanLayout layout(256, 256, 1, 1);
  const std::span<const std::byte> nowhere(reinterpret_cast<const std::byte*>(uintptr_t{0x10000}),
                                           static_cast<std::size_t>(layout.bytes));
  const PlanView plan = PlanView::on_device(layout, nowhere, kDevice);
  EXPECT_TRUE(plan.defined());
  EXPECT_EQ(plan.device(), kDevice);
  EXPECT_EQ(plan.data(), nowhere.data());
  EXPECT_EQ(plan.layout().bytes, layout.bytes);
  expect_invalid({"CUDA device 0"}, [&] { plan.live_granules(); });
  expect_invalid({"CUDA device 0"}, [&] { TiledPlanView tiled(plan, {128, 128}); });
  expect_invalid({"plan", "bytes"}, [&] { PlanView::on_device(layout, nowhere.first(8), kDevice); });
  expect_invalid({"plan", "aligned to 8"}, [&] { PlanView::on_device(layout, nowhere.subspan(4), kDevice); });
  expect_invalid({"CUDA devices"}, [&] { PlanView::on_device(layout, nowhere, Device{}); });
}

TEST(DevicePlan, ValidateComparesContents) {
  std::vector<int32_t> ends(256, 9);
  const Mask mask({.seqlen_q = 256, .seqlen_k = 256, .lts = ends});
  ends[100] = 10;
  const Mask changed({.seqlen_q = 256, .seqlen_k = 256, .lts = ends});
  const Plan plan(mask);
  EXPECT_NO_THROW(validate_plan(mask, plan.view()));
  expect_invalid({"plan", "build it anew"}, [&] { validate_plan(changed, plan.view()); });
  expect_invalid({"plan", "build it anew"}, [&] { validate_plan(masks::causal(256, 200), plan.view()); });
  expect_invalid({"plan is undefined"}, [&] { validate_plan(mask, PlanView()); });
  expect_invalid({"vectors are on CUDA device 0"}, [&] { validate_plan(device_mask(), plan.view()); });
  const std::vector<uint64_t> copy(plan.buffer().size() / 8);
  const PlanView on_device = PlanView::on_device(plan.view().layout(), std::as_bytes(std::span(copy)), kDevice);
  expect_invalid({"scratch has 0 bytes"}, [&] { validate_plan(device_mask(), on_device); });
}

TEST(DeviceCall, MaskPlanAndTensorsMustBeInOnePlace) {
  const auto refused = [](std::initializer_list<std::string> parts, auto&& change) {
    ForwardArgs args = device_call();
    change(args);
    expect_invalid(parts, [&] { forward_workspace(args); });
  };
  const Mask host({.seqlen_q = 256, .seqlen_k = 256, .lts = std::vector<int32_t>(256, 9)});
  refused({"mask's vectors are on the CPU", "q on CUDA device 0", "copy the vectors to CUDA device 0",
           "from_startend_row_indices"},
          [&](auto& a) { a.mask = host; });
  const Plan plan(*device_call().mask);
  refused({"plan is on the CPU", "CUDA device 0", "build_plan"}, [&](auto& a) { a.plan = plan.view(); });
  refused({"k and q are on different devices"}, [](auto& a) { a.k.device.index = 1; });
  const std::vector<uint8_t> visible(256 * 256, 1);
  refused({"dense_mask is on the CPU"}, [&](auto& a) {
    a.mask.reset();
    a.dense_mask = TensorView::contiguous(visible.data(), DataType::kBool, {1, 1, 256, 256});
  });
  ForwardArgs on_cpu = device_call(DataType::kFloat32);
  for (TensorView* t : {&on_cpu.q, &on_cpu.k, &on_cpu.v, &on_cpu.out, &on_cpu.lse}) t->device = {};
  on_cpu.mask = device_mask();
  expect_invalid({"mask's vectors are on CUDA device 0", "q on the CPU"}, [&] { forward_workspace(on_cpu); });
}

}  // namespace
}  // namespace flashmask::test
