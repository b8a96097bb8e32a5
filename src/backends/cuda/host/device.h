// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace flashmask::cuda {

/// Properties of a device that can be read without a context on it.
struct DeviceProperties {
  std::string name;
  int major = 0, minor = 0;  ///< compute capability
  int multiprocessors = 0;
  int shared_memory_per_block = 0;  ///< bytes a block may opt in to
  int64_t memory_bytes = 0;
};

/// The devices of this process, asked for once.
struct DeviceList {
  std::vector<DeviceProperties> devices;
  int driver = 0;       ///< newest CUDA version the driver supports, 1000 * major + 10 * minor; 0: no driver
  int runtime = 0;      ///< CUDA version the library was built with
  std::string problem;  ///< why there is no device; empty if there is one
};

/// Asks the driver on the first call and keeps the answer; makes no context. Thread-safe, never throws on what
/// the driver says.
const DeviceList& device_list();

/// The properties of device `index`; throws kNoDevice, saying what there is, if it is not there.
const DeviceProperties& device(int32_t index);

/// "13.0" of 13000.
std::string version_text(int version);

/// Makes a device the calling thread's current one for as long as the guard lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t index);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace flashmask::cuda
