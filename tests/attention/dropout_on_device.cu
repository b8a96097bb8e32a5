// SPDX-License-Identifier: Apache-2.0
// Never run: that it compiles shows that dropout.h is device code.
#include "common/dropout.h"

namespace dropout = flashmask::dropout;

__global__ void use_every_function(const uint64_t* state, dropout::Origins origins, double p, uint32_t row,
                                   uint32_t key, bool* kept, double* scale) {
  const uint32_t batch = blockIdx.y, head = origins.first_head + blockIdx.x;
  const dropout::Words words = dropout::draw(dropout::key_of(state[0], state[1]), batch, head,
                                             origins.row_draw(batch, row), origins.key_draw(batch, key));
  const uint32_t threshold = dropout::threshold_of(p);
  *kept = dropout::bits_of(words, row, key) >= threshold;
  *scale = dropout::scale_of(threshold);
}
