// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <type_traits>

#include "c_api/read.h"

namespace flashmask::c_api {

ForwardArgs read_args(const fm_forward_args& c, const MaskView* mask, Device device);
BackwardArgs read_args(const fm_backward_args& c, const MaskView* mask, Device device);

/// A call's arguments as the library takes them, its mask apart.
template <typename CArgs>
class CallArgs {
 public:
  CallArgs(const CArgs* from, Device device) : from_(read_struct(from, "args")) {
    if (from_.mask) mask_.emplace(from_.mask, device);
    args_ = read_args(from_, mask(), device);
  }
  const auto& args() const { return args_; }
  /// Null: the call has none.
  const MaskView* mask() const { return mask_ ? &mask_->view() : nullptr; }
  /// The mask for a call that some backend takes, hashed if its plan has a hash to compare; null if it has no mask.
  const MaskView* mask_contents() {
    if (!mask_) return nullptr;
    return args_.plan.defined() ? &mask_->hashed_contents() : &mask_->contents();
  }

 private:
  CArgs from_;
  std::optional<CallMask> mask_;
  std::conditional_t<std::is_same_v<CArgs, fm_forward_args>, ForwardArgs, BackwardArgs> args_;
};

}  // namespace flashmask::c_api
