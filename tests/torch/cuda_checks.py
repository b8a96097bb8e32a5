# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests on CUDA tensors."""

import functools

import torch
from devices import DEVICE
from harness import kernels
from test_attention import S
from test_attention import tensors as tensors_of_any_dims
from torch.autograd import DeviceType

FORWARD = ["_fwd_"]
FAST_BACKWARD = ["_preprocess", "_bwd_", "_convert_dq"]
BACKWARD = ["_magnitudes", *FAST_BACKWARD]  # deterministic
# Kernels for grouped heads, as in tensors(), with so little work that items share a key head's query heads.
GROUPED_BACKWARD = [*BACKWARD, "_reduce_dkv"]
GROUPED_FAST_BACKWARD = [*FAST_BACKWARD, "_reduce_dkv"]
WITHOUT_SUMS = [name for name in GROUPED_FAST_BACKWARD if name != "_convert_dq"]
PLAN = ["Memset", "plan_classify", "plan_transpose", "plan_rank", "plan_extents"]


def tensors(**shape):
    """Random q, k and v of one head dim, for what the head dims do not matter to."""
    return tensors_of_any_dims(head_dim=64, head_dim_v=64, **shape)


@functools.cache
def runs_hopper_kernels():
    """Tells if calls that name no kernels run Hopper's on DEVICE."""
    return kernels.set_on(DEVICE) == "sm90"


def profiled(call):
    """(kernels, copies and fills in their order, names of what the host asked of CUDA's runtime) of one call."""
    for _ in range(2):  # the first profile of a process may miss events
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        ) as profile:
            call()
            torch.cuda.synchronize()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    device = [event.name for event in events if event.device_type == DeviceType.CUDA]
    return device, [
        event.name for event in events if event.device_type == DeviceType.CPU and event.name.startswith("cu")
    ]


def assert_runs(call, expected):
    """On the device exactly these, a word of each name; no copy anywhere, and the host waits for nothing."""
    device, host = profiled(call)
    assert len(device) == len(expected) and all(word in name for word, name in zip(expected, device)), (
        expected,
        device,
    )
    waits = [name for name in host if "Memcpy" in name or "Synchronize" in name and name != "cudaDeviceSynchronize"]
    assert not waits and host.count("cudaDeviceSynchronize") <= 2, host  # profiled's own, and perhaps the profiler's


def bounds_of(seqlen=S):
    return torch.randint(0, seqlen + 1, (1, 1, seqlen, 1), dtype=torch.int32).to(DEVICE)
