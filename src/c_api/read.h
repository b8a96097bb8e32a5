// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <optional>
#include <span>
#include <string>

#include "common/host_memory.h"
#include "common/message.h"
#include "flashmask/attention.h"
#include "flashmask/c_api.h"
#include "flashmask/mask.h"
#include "flashmask/plan.h"
#include "mask/mask_tensors.h"

/// Shared by the functions of c_api.h: reads a caller's structs as the library's, and turns exceptions into statuses.
namespace flashmask::c_api {

/// The calling thread's, for fm_last_error and fm_last_error_column.
void set_last_error(std::string text, int64_t column = -1);

/// Runs f and turns whatever it throws into a status and a message.
template <typename F>
fm_status guarded(F&& f) {
  try {
    f();
    return FM_OK;
  } catch (const Error& error) {
    set_last_error(error.what(), error.column());
    return static_cast<fm_status>(error.code());
  } catch (const std::bad_alloc&) {
    set_last_error(kNoHostMemory);
    return FM_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    set_last_error(message("internal error: ", error.what()));
    return FM_INTERNAL;
  } catch (...) {
    set_last_error("internal error");
    return FM_INTERNAL;
  }
}

template <typename T>
T& required(T* pointer, const char* argument) {
  if (!pointer) throw_invalid(argument, " is NULL");
  return *pointer;
}

/// The sizes that a struct had in earlier versions. None so far: 0.1 is the first. A field that is added comes with the
/// size that the struct had before it.
template <typename Struct>
inline constexpr std::array<uint32_t, 0> kEarlierSizes{};

/// True if a version has a Struct of `size` bytes or, beyond this library's, may come to have one: no struct ends in
/// padding, so each size is a multiple of the alignment.
template <typename Struct>
constexpr bool is_size_of(uint32_t size) {
  constexpr uint32_t kMost = 65536;
  if (size <= sizeof(Struct)) return size == sizeof(Struct) || std::ranges::count(kEarlierSizes<Struct>, size) > 0;
  return size <= kMost && size % alignof(Struct) == 0;
}

/// A caller's struct in this library's size: fields the caller does not know are zero, and fields this library
/// does not know must be.
template <typename Struct>
Struct read_struct(const Struct* from, const char* argument) {
  uint32_t size = 0;
  std::memcpy(&size, &required(from, argument), sizeof(size));
  if (!is_size_of<Struct>(size))
    throw_invalid(argument, "->struct_size is ", size, ", which no version's struct has; it must be ", sizeof(Struct),
                  ", sizeof the struct");
  Struct result{};
  std::memcpy(&result, from, std::min<std::size_t>(size, sizeof(Struct)));
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  if (size > sizeof(Struct) &&
      std::any_of(bytes + sizeof(Struct), bytes + size, [](unsigned char b) { return b != 0; })) {
    throw_unsupported(argument, " has fields that this version of the library does not know; leave them zero");
  }
  return result;
}

/// A struct of read_struct, back in the caller's: as many of its fields as the caller knows.
template <typename Struct>
void write_struct(const Struct& from, Struct* to) {
  std::memcpy(to, &from, std::min<std::size_t>(from.struct_size, sizeof(Struct)));
}

/// Throws if a bit is set that is not among `known`.
void check_flags(uint32_t flags, uint32_t known, const char* argument);

TensorView tensor(const fm_tensor& t, const char* argument, Device device = {});

/// A wait's limit in seconds: 0 is the default. Throws unless it is accepted.
double timeout_of(double seconds, const char* argument);

std::span<std::byte> memory(void* data, std::size_t bytes, const char* argument);

/// A mask of the C interface, whose shapes are checked before anything of it is read. Contents are borrowed; those in
/// host memory that a view cannot borrow are copied.
class CallMask {
 public:
  CallMask(const fm_mask* from, Device device);
  /// Shapes alone, until contents() has checked the rest.
  const MaskView& view() const { return view_; }
  /// The view with contents to be read.
  const MaskView& contents();
  /// The contents with their hash if they are in host memory: for a plan that is compared with them or carries it.
  const MaskView& hashed_contents();
  /// The mask by itself, in host memory.
  Mask copy() const;

 private:
  MaskTensors tensors_;
  MaskView view_;
  std::optional<Mask> copy_;
};

/// A call's options, with the device its tensors are on.
struct CallOptions {
  Options options;
  Device device;
  fm_allocate allocate = nullptr;
  void* allocate_context = nullptr;
  fm_executed_tiles* executed = nullptr;
  ExecutedTiles counted;

  explicit CallOptions(const fm_options* from);
  /// The options to pass on; counting needs this object to stay where it is.
  const Options& with_counter();
  void report() const;
};

/// The caller's workspace, or one that its allocate gives.
template <typename AnyCall>
std::span<std::byte> workspace_for(const AnyCall& call, std::span<std::byte> given, const CallOptions& options) {
  if (!options.allocate) return given;
  if (given.data()) throw_invalid("workspace and options->allocate are both given; one must be NULL");
  const std::size_t bytes = call.workspace_bytes();
  if (bytes == 0) return {};
  void* const memory = options.allocate(options.allocate_context, bytes);
  if (!memory)
    throw Error(ErrorCode::kOutOfMemory,
                message("options->allocate gave no memory for a workspace of ", bytes, " bytes"));
  return {static_cast<std::byte*>(memory), bytes};
}

/// As much of `full` as fits with its terminating zero.
void copy_text(const std::string& full, char* text, std::size_t capacity, std::size_t* length);

/// The plan of a call, which on a device says nothing itself: its layout is that of the call's mask.
PlanView read_plan(const void* plan, std::size_t bytes, const AttentionInputs& args, const MaskView* mask,
                   Device device);

}  // namespace flashmask::c_api
