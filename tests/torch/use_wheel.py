# SPDX-License-Identifier: Apache-2.0
"""Step of check_wheel with the wheel installed: the libraries are the wheel's, and attention is right."""

import sys
from importlib import metadata
from pathlib import Path

import flashmask
import torch

q, k, v = (torch.randn(1, 300, heads, 64, requires_grad=True) for heads in (4, 2, 2))
mask = flashmask.masks.causal_document(seqlens=[100, 200])
print(mask)
out = flashmask.flashmask_attention(q, k, v, mask)
bhsd = (x.transpose(1, 2) for x in (q, k, v))
want = torch.nn.functional.scaled_dot_product_attention(*bhsd, attn_mask=mask.to_dense(), enable_gqa=True).transpose(
    1, 2
)
dout = torch.randn_like(out)
for got, expected in zip(
    (out, *torch.autograd.grad(out, (q, k, v), dout)), (want, *torch.autograd.grad(want, (q, k, v), dout))
):
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)

# An exception of the operators' is one of torch's C++ runtime.
try:
    flashmask.flashmask_attention(q[:, :299], k, v, mask)
except ValueError as error:
    assert "299" in str(error), error
else:
    raise AssertionError("a mask of other rows was taken")

# One copy of each: OpenMP's runtime, which torch has loaded before, is not loaded again.
package = Path(flashmask.__file__).parent
assert package.is_relative_to(sys.prefix), package
assert (package / "py.typed").is_file()
assert flashmask.__version__ == metadata.version("flashmask")
lines = Path("/proc/self/maps").read_text().splitlines()
loaded = {
    Path(line.split()[-1]) for line in lines if any(name in line for name in ("libflashmask", "libhwy", "libgomp"))
}
own = {package / name for name in ("libflashmask.so", "libflashmask_torch.so", "libhwy.so.1")}
assert loaded == own | {Path(torch.__file__).parent / "lib/libgomp.so.1"}, loaded
