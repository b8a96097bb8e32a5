// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include "common/message.h"
#include "flashmask/attention.h"
#include "flashmask/options.def"

namespace flashmask {

/// A number of Features.
template <typename T>
struct ValueOption {
  const char* name;             ///< in errors, and of the field of fm_options
  const char* feature;          ///< in names()
  T (*value)(const Features&);  ///< 0: not asked for
  bool (*accepts)(T);           ///< other than 0
  const char* accepted;         ///< in words
};
using NumberOption = ValueOption<double>;
using CountOption = ValueOption<int64_t>;

/// A tensor [heads_q] of Features, or if it may differ by batch entry [batch, heads_q]; undefined: not asked for.
struct TensorOption {
  const char* name;
  const TensorView& (*value)(const Features&);
  bool takes_own_type;  ///< q's dtype, beside float32
  bool by_batch;        ///< [batch, heads_q] is taken, too
};

/// A flag of Features.
struct FlagOption {
  const char* name;
  bool (*value)(const Features&);
};

/// True for a number of keys that sums may be split at.
constexpr bool is_split_size(int64_t keys) { return keys > 0 && keys % 128 == 0 && keys <= kMaxSeqlen; }

#define FLASHMASK_NONE(...)
#define FLASHMASK_NUMBER(field, member, feature, accepts, accepted) \
  {#field, feature, [](const Features& f) { return f.member; }, [](double x) { return accepts; }, accepted},
#define FLASHMASK_COUNT(field, member, feature, accepts, accepted) \
  {#field, feature, [](const Features& f) { return f.member; }, [](int64_t x) { return accepts; }, accepted},
#define FLASHMASK_TENSOR(field, member, takes_own_type, by_batch) \
  {#field, [](const Features& f) -> const TensorView& { return f.member; }, takes_own_type, by_batch},
#define FLASHMASK_FLAG(field, member) {#field, [](const Features& f) { return f.member; }},

inline constexpr NumberOption kNumberOptions[] = {
    FLASHMASK_FEATURES(FLASHMASK_NONE, FLASHMASK_NUMBER, FLASHMASK_NONE, FLASHMASK_NONE)};
inline constexpr CountOption kCountOptions[] = {
    FLASHMASK_FEATURES(FLASHMASK_NONE, FLASHMASK_NONE, FLASHMASK_COUNT, FLASHMASK_NONE)};
inline constexpr TensorOption kTensorOptions[] = {
    FLASHMASK_FEATURES(FLASHMASK_TENSOR, FLASHMASK_NONE, FLASHMASK_NONE, FLASHMASK_NONE)};
inline constexpr FlagOption kFlagOptions[] = {
    FLASHMASK_FEATURES(FLASHMASK_NONE, FLASHMASK_NONE, FLASHMASK_NONE, FLASHMASK_FLAG)};

#undef FLASHMASK_FLAG
#undef FLASHMASK_COUNT
#undef FLASHMASK_TENSOR
#undef FLASHMASK_NUMBER
#undef FLASHMASK_NONE

/// Options of calls of every kind, as the backends see them.
struct CommonOptions {
  double softmax_scale = 1;
  Features features{};
  int threads = 0;   ///< as asked for: 0 is the backend's default
  int max_ctas = 0;  ///< the attention kernel's; 0: one for each multiprocessor
  void* stream = nullptr;

  /// The factor of products in kernels that compute in float32.
  float scale() const { return static_cast<float>(softmax_scale); }
};

/// Throws unless the options' numbers are accepted.
void check_options(const Options& options);
/// Takes over checked options; head_dim gives the scale where the options have none.
void read_options(const Options& options, int64_t head_dim, CommonOptions& to);
/// Throws unless the tensors among them are those of a call of this batch, heads, dtype and device.
void check_tensor_options(const Features& features, int64_t batch, int64_t heads_q, DataType dtype,
                          const Device& device, bool with_data);
/// Throws kInvalidArgument unless the option is accepted.
template <typename T>
void check_value(const ValueOption<T>& option, const Features& features) {
  const T value = option.value(features);
  if (value != 0 && !option.accepts(value)) throw_invalid(option.name, " is ", value, "; it must be ", option.accepted);
}
/// The row of that name, which there is.
const NumberOption& option_of(std::string_view name);

}  // namespace flashmask
