// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

/// Throws if a call of torch's C interface failed.
void torch_check(AOTITorchError error);

/// Prefix that Python turns into torch.OutOfMemoryError: torch passes on an exception's text, not its type.
constexpr const char* kOutOfMemory = "OutOfMemoryError: ";

/// A torch device, which holds a tensor's memory.
struct Place {
  int32_t type = 0;   ///< aoti_torch_device_type_cpu() or _cuda()
  int32_t index = 0;  ///< CUDA device number

  bool is_cpu() const { return type == aoti_torch_device_type_cpu(); }
  /// fm_options::device.
  int32_t fm_device() const { return is_cpu() ? 0 : 1 + index; }
  /// "cpu", "cuda:1".
  std::string name() const;
  /// There is one CPU, whatever its index.
  bool operator==(const Place& other) const { return type == other.type && (is_cpu() || index == other.index); }
};

Place place_of(const torch::stable::Tensor& tensor);
/// Throws std::invalid_argument if it is neither CPU nor CUDA.
Place place_of(const torch::stable::Device& device);

/// torch's number of threads (torch.set_num_threads).
int32_t torch_threads();

/// torch's current stream on a CUDA device, a cudaStream_t. The function that knows is only in a torch with CUDA, so it
/// is looked up when it is needed: the same file loads in a torch without.
void* current_stream(const Place& place);

/// dtype as torch's C interface counts it.
int32_t torch_dtype(const torch::stable::Tensor& tensor);

/// The error of memory that there is not: a MemoryError on the CPU, an error of kOutOfMemory on CUDA.
[[noreturn]] void throw_out_of_memory(const std::string& text, const Place& place);

/// An uninitialised contiguous tensor. Where there is no memory for it, the error says how much `name` needed, as in
/// all that follow.
torch::stable::Tensor empty(const char* name, const int64_t* shape, size_t rank, int32_t dtype, const Place& place);
template <size_t kRank>
torch::stable::Tensor empty(const char* name, const std::array<int64_t, kRank>& shape, int32_t dtype,
                            const Place& place) {
  return empty(name, shape.data(), kRank, dtype, place);
}
/// An uninitialised dense tensor of `tensor`'s shape and of `dtype`, with its dimensions in the order of `tensor`'s
/// strides, but the last one innermost: the like of a transposed view is transposed, too.
torch::stable::Tensor empty_like(const char* name, const torch::stable::Tensor& tensor, int32_t dtype,
                                 const Place& place);
/// A contiguous copy, in memory of its own.
torch::stable::Tensor copy_of(const char* name, const torch::stable::Tensor& tensor, const Place& place);
/// `bytes` bytes of memory from torch's allocator.
torch::stable::Tensor empty_bytes(const char* name, size_t bytes, const Place& place);
