#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel of tile_config.h for sm_90a with the NVRTC of an older CUDA, and says what it spills.

nvrtc_kernels.py WHEELS: a folder of NVIDIA's Python packages (pip install --target): nvrtc, runtime, nvcc and cccl.
NVRTC compiles device code alone and has no C++ library, so the few names that the kernels take from it come from
libcu++.
"""

import ctypes
import itertools
import re
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent
STANDARD = "#include <cuda/std/{0}>\nnamespace std {{ using namespace ::cuda::std; }}\nusing namespace ::cuda::std;\n"
HEADERS = {name: STANDARD.format(name) for name in ("bit", "cstddef", "cstdint", "type_traits")}
HEADERS["stdint.h"] = HEADERS["cstdint"]
HEADERS["stdlib.h"] = ""

HEAD = """
#define CUDARTAPI
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#include <cuda_device_runtime_api.h>
"""
ELEMENTS = {"bf16": "kBFloat16", "f16": "kFloat16"}


def strings(values):
    return (ctypes.c_char_p * len(values))(*(value.encode() for value in values))


def load(wheels):
    library = wheels / "cuda_nvrtc" / "lib"
    for builtins in sorted(library.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library / "libnvrtc.so.12"))


def compile_unit(nvrtc, wheels, text):
    """Compiles a unit: whether it succeeded, and the compiler's log."""
    folders = [
        SOURCES / "src",
        SOURCES / "include",
        *(wheels / name / "include" for name in ("cuda_runtime", "cuda_nvcc", "cuda_cccl")),
    ]
    options = [
        "-arch=sm_90a",
        "-std=c++20",
        "-default-device",
        "-DNDEBUG",
        "--ptxas-options=-v",
        *(f"-I{folder}" for folder in folders),
    ]
    program = ctypes.c_void_p()
    made = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program),
        text.encode(),
        b"kernels.cu",
        len(HEADERS),
        strings(list(HEADERS.values())),
        strings(list(HEADERS)),
    )
    failed = made or nvrtc.nvrtcCompileProgram(program, len(options), strings(options))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return not failed, log.value.decode()


def main():
    wheels = Path(sys.argv[1]) / "nvidia"
    nvrtc = load(wheels)
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    failed = False
    hopper = SOURCES / "src/backends/cuda/sm90"
    table = (hopper / "tile_config.h").read_text()
    for direction in ("forward", "backward"):
        template = (hopper / direction / "instance.cu.in").read_text()
        begin = direction.capitalize()
        tiles = re.findall(rf"^ *{begin}Tile{{(\d+), (\d+), (\d+), (k\w+), ", table, re.MULTILINE)
        variants = re.findall(rf'^ *{begin}Variant{{k\w+, (k\w+), "([a-z.]*)"', table, re.MULTILINE)
        product = itertools.product(tiles, enumerate(variants), ELEMENTS.items())
        for (head_dim, head_dim_v, consumers, features), (variant, (of_tiles, suffix)), (element, dtype) in product:
            if of_tiles not in ("kAny", features, features.removesuffix("AndSharedRows")):
                continue
            values = {
                "dtype": dtype,
                "element": element,
                "head_dim": head_dim,
                "head_dim_v": head_dim_v,
                "consumers": consumers,
                "variant": str(variant),
                "name": "kernel",
            }
            unit = HEAD + re.sub(r"@(\w+)@", lambda match, values=values: values[match[1]], template)
            compiled, log = compile_unit(nvrtc, wheels, unit)
            spills = max((int(stores) for stores in re.findall(r"(\d+) bytes spill stores", log)), default=0)
            failed |= not compiled
            tile = f"{head_dim} / {head_dim_v} {consumers}"
            print(
                f"NVRTC {major.value}.{minor.value}: {direction}{suffix} {element} {tile}:",
                f"compiled, spills {spills} bytes" if compiled else "error\n" + log,
                flush=True,
            )
    sys.exit(failed)


main()
