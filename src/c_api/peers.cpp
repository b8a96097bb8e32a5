// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <vector>

#include "c_api/read.h"
#include "call/peers.h"

namespace flashmask::c_api {
namespace {

constexpr int64_t kMostTransfers = int64_t{1} << 20;

Device cuda_device(int32_t device) {
  if (device < 1) throw_invalid("device is ", device, "; it must be 1 + the index of a CUDA device");
  return {Device::Kind::kCuda, device - 1};
}

void check_pointer(const void* pointer, const char* argument) {
  if (!pointer) throw_invalid(argument, " is NULL");
}

peers::Transfer read_transfer(const fm_transfer& t) {
  if (t.kind > FM_WRITE_FLAG) throw_invalid("a transfer's kind is ", t.kind, "; it must be an fm_transfer_kind");
  check_pointer(t.to, "a transfer's to");
  if (t.kind == FM_COPY) check_pointer(t.from, "a transfer's from");
  return {static_cast<peers::Transfer::Kind>(t.kind), t.to, t.from, t.bytes, t.value};
}

void check_count(const char* argument, int64_t count, int64_t most) {
  if (count < 0 || count > most) throw_invalid(argument, " is ", count, "; it must be at least 0 and at most ", most);
}

std::span<uint32_t* const> read_flags(uint32_t* const* flags, int64_t count, const char* argument) {
  check_count("the number of peers", count, peers::kMostPeers);
  if (count > 0) required(flags, argument);
  for (int64_t n = 0; n < count; ++n) required(flags[n], argument);
  return {flags, static_cast<std::size_t>(count)};
}

peers::Settlement read_settlement(const fm_settlement& s) {
  if (s.peers > 0) required(s.read_by_peers, "settlement->read_by_peers");
  return {.epoch = s.epoch,
          .pieces = s.pieces,
          .state = reinterpret_cast<uint32_t*>(&required(s.state, "settlement->state")),
          .read_by_peers = {s.read_by_peers, s.peers},
          .read_flags = read_flags(s.read_flags, s.peers, "settlement->read_flags"),
          .out = memory(s.out, s.out_bytes, "settlement->out"),
          .lse = memory(s.lse, s.lse_bytes, "settlement->lse"),
          .report = &required(s.report, "settlement->report"),
          .timeout = timeout_of(s.timeout, "settlement->timeout")};
}

}  // namespace
}  // namespace flashmask::c_api

using namespace flashmask;
using namespace flashmask::c_api;

fm_status fm_peer_memory_create(int32_t device, size_t bytes, void** data, fm_peer_handle* handle) {
  return guarded([&] {
    required(data, "data");
    required(handle, "handle");
    if (bytes == 0) throw_invalid("bytes is 0; it must be at least 1");
    const peers::SharedMemory made = peers::create(cuda_device(device), bytes);
    *data = made.data;
    std::memcpy(handle->bytes, made.handle.data(), sizeof(handle->bytes));
  });
}

fm_status fm_peer_memory_open(int32_t device, const fm_peer_handle* handle, void** data) {
  return guarded([&] {
    peers::Handle named;
    std::memcpy(named.data(), required(handle, "handle").bytes, sizeof(named));
    required(data, "data") = peers::open(cuda_device(device), named);
  });
}

fm_status fm_peer_memory_release(int32_t device, void* data, int32_t is_opened) {
  return guarded([&] {
    check_pointer(data, "data");
    peers::release(cuda_device(device), data, is_opened != 0);
  });
}

fm_status fm_transfers_enqueue(const fm_transfer* transfers, int64_t count, int32_t device, void* stream) {
  return guarded([&] {
    check_count("count", count, kMostTransfers);
    if (count > 0) required(transfers, "transfers");
    std::vector<peers::Transfer> read;
    read.reserve(static_cast<std::size_t>(count));
    for (int64_t n = 0; n < count; ++n) read.push_back(read_transfer(transfers[n]));
    peers::enqueue(read, cuda_device(device), stream);
  });
}

fm_status fm_peers_signal(uint32_t* const* flags, int64_t count, uint32_t value, int32_t device, void* stream) {
  return guarded([&] { peers::signal(read_flags(flags, count, "flags"), value, cuda_device(device), stream); });
}

fm_status fm_peers_settle(const fm_settlement* settlement, int32_t device, void* stream) {
  return guarded([&] {
    const auto read = read_struct(settlement, "settlement");
    peers::settle(read_settlement(read), cuda_device(device), stream);
  });
}
