// SPDX-License-Identifier: Apache-2.0
#include "mask/families/families.h"
#include "mask/families/host_run.h"

namespace flashmask::build {

bool write_vectors(HostRun& run, const Arguments& arguments, const Output& output) {
  Arguments own = arguments;
  int32_t unfit = 0;
  own.unfit = &unfit;
  build(run, own, output);
  return unfit == 0;
}

void build_on_host(const Arguments& arguments, const Output& output) {
  HostRun run({arguments.shape.batch, arguments.shape.heads});
  if (!write_vectors(run, arguments, output))
    with_family(*arguments.family, [&](auto family) { family.throw_first_misfit(run, arguments); });
  if (arguments.unfit) *arguments.unfit = 0;
}

}  // namespace flashmask::build
