/* SPDX-License-Identifier: Apache-2.0 */
/* One causal head through the C interface, its result checked, and an error asked for and read. */
#include <flashmask/c_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SEQLEN = 5, DIM = 8 };

static fm_tensor tensor(float* data, int32_t ndim, const int64_t* shape) {
  fm_tensor t;
  int64_t stride = 1;
  int32_t d;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.dtype = FM_FLOAT32;
  t.ndim = ndim;
  for (d = ndim - 1; d >= 0; --d) {
    t.shape[d] = shape[d];
    t.stride[d] = stride;
    stride *= shape[d];
  }
  return t;
}

int main(void) {
  static const int64_t rows[4] = {1, SEQLEN, 1, DIM}, statistics[3] = {1, 1, SEQLEN};
  float q[SEQLEN * DIM], v[SEQLEN * DIM], out[SEQLEN * DIM], lse[SEQLEN];
  fm_mask mask;
  fm_forward_args args;
  size_t bytes = 0;
  void* workspace;
  int n;
  if (fm_abi_version() != FM_ABI_VERSION) return 1;
  for (n = 0; n < SEQLEN * DIM; ++n) {
    q[n] = 1.0f;
    v[n] = (float)(n / DIM);
  }
  memset(&mask, 0, sizeof mask);
  mask.struct_size = sizeof mask;
  mask.flags = FM_CAUSAL;
  mask.seqlen_q = mask.seqlen_k = SEQLEN;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.q = args.k = tensor(q, 4, rows);
  args.v = tensor(v, 4, rows);
  args.out = tensor(out, 4, rows);
  args.lse = tensor(lse, 3, statistics);
  args.mask = &mask;
  if (fm_forward_workspace(&args, NULL, &bytes) != FM_OK) return 2;
  workspace = malloc(bytes);
  if (fm_forward(&args, workspace, bytes, NULL) != FM_OK) {
    fprintf(stderr, "%s\n", fm_last_error());
    return 3;
  }
  free(workspace);
  for (n = 0; n < SEQLEN; ++n) {
    /* Equal scores: row n averages the positions 0 to n. */
    if (fabsf(out[n * DIM] - (float)n / 2.0f) > 1e-5f) return 4;
  }
  args.q.dtype = FM_INT32;
  if (fm_forward_workspace(&args, NULL, &bytes) != FM_INVALID_ARGUMENT) return 5;
  printf("flashmask %s: %s\n", fm_version(), fm_last_error());
  return strstr(fm_last_error(), "q is int32") ? 0 : 6;
}
