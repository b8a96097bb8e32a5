// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <utility>

#include "cache/check_cache.h"
#include "cache/sequence.h"
#include "common/arithmetic.h"
#include "common/message.h"
#include "common/tensor_checks.h"
#include "mask/host_only.h"

namespace flashmask {
namespace {

void check_range(const char* argument, int64_t b, int64_t value, int64_t least, int64_t most, const char* why) {
  if (value < least || value > most)
    throw_invalid(argument, "[", b, "] is ", value, "; it must be between ", least, " and ", most, ", ", why);
}

void check_rows(const CachedProblem& p, int64_t b) {
  if (!p.is_packed()) return;
  const int64_t before = b == 0 ? 0 : int32_at(p.cu_seqlens_q, b);
  check_range("cu_seqlens_q", b, int32_at(p.cu_seqlens_q, b), 0, b == 0 ? 0 : p.rows,
              b == 0 ? "the first row" : "q's rows");
  check_range("cu_seqlens_q", b + 1, int32_at(p.cu_seqlens_q, b + 1), before, p.rows,
              "the number before it and q's rows");
}

/// Throws unless the tensors that are read here are there.
void check_values(const CachedProblem& p) {
  const KvCacheView& c = p.cache;
  for (const auto& [argument, t] : {std::pair{"cu_seqlens_q", &p.cu_seqlens_q},
                                    {"page_table", &c.page_table},
                                    {"page_indptr", &c.page_indptr},
                                    {"page_indices", &c.page_indices},
                                    {"seqlens", &c.seqlens},
                                    {"tail_lens", &p.mask.tail_lens}}) {
    if (t->defined()) check_data(argument, *t);
  }
}

/// How many keys the tables of a request have room for.
int64_t room_of(const CachedProblem& p, int64_t b) {
  if (!p.cache.page_indptr.defined()) return p.capacity;
  const int64_t entries = p.cache.page_indices.shape[0];
  const int64_t begin = int32_at(p.cache.page_indptr, b), end = int32_at(p.cache.page_indptr, b + 1);
  check_range("page_indptr", b, begin, 0, entries, "the number of page_indices");
  check_range("page_indptr", b + 1, end, begin, entries, "the number before it and that of page_indices");
  return (end - begin) * p.page_size;
}

void check_pages(const CachedProblem& p, int64_t b, int64_t keys) {
  if (!p.has_tables()) return;
  for (int64_t n = 0; n < ceil_div(keys, p.page_size); ++n) {
    const bool is_table = p.cache.page_table.defined();
    const int64_t page = is_table ? int32_at(p.cache.page_table, b, n)
                                  : int32_at(p.cache.page_indices, int32_at(p.cache.page_indptr, b) + n);
    if (page < 0 || page >= p.pages)
      throw_invalid(is_table ? "page_table" : "page_indices", " has page ", page, " for keys from ", n * p.page_size,
                    " of request ", b, ", which has ", keys, "; it must be between 0 and ", p.pages - 1);
  }
}

}  // namespace

void validate_cached(const CachedForwardArgs& args) {
  CachedForwardArgs shapes = args;
  const CachedProblem p = check_cached(shapes, {}, false);
  if (p.device.kind != Device::Kind::kCpu)
    throw_invalid("q is on ", describe(p.device), "; values are read in host memory: give copies of them");
  check_values(p);
  for (int64_t b = 0; b < p.batch; ++b) {
    check_rows(p, b);
    const int64_t room = room_of(p, b);
    if (p.cache.seqlens.defined())
      check_range("seqlens", b, int32_at(p.cache.seqlens, b), 0, room, "the keys that the request has room for");
    const Sequence sequence(p, b);
    check_pages(p, b, sequence.keys());
    if (p.mask.tail_lens.defined())
      check_range("tail_lens", b, int32_at(p.mask.tail_lens, b), 0, std::min(p.mask.tail.shape[1], sequence.keys()),
                  "the tail's rows and the request's keys");
  }
}

}  // namespace flashmask
