# SPDX-License-Identifier: Apache-2.0
# Each target is the commands that one would type.

PYTHON := $(CURDIR)/build/venv/bin/python
FLASHMASK := build/release/bin/flashmask

# CUDA: whether the CUDA backend is built: on, off, or auto, where a GPU's driver is found, which is the default of what
# runs here. What may run elsewhere has the backend where a CUDA compiler is found.
ifneq ($(filter-out auto on off,$(CUDA)),)
  $(error CUDA is '$(CUDA)'; it must be auto, on or off)
endif
demo test test-asan lint: override CUDA := $(or $(CUDA),auto)

# Prints the one line that says what is built and why, and what is wrong.
configure := cmake -Wno-dev --log-level=NOTICE >/dev/null --preset
cuda_options = -DFLASHMASK_CUDA=$(or $(CUDA),COMPILER) -DFLASHMASK_PYTHON=$(PYTHON)
define build_command
	scripts/setup build $(CUDA)
	$(configure) demo $(cuda_options)
	cmake --build --preset demo
endef

.PHONY: help demo test test-long test-asan test-tsan test-aarch64 fuzz lint build wheel install uninstall gallery \
  format clean

help:
	@echo "make demo       set up, build, and run the main job on the example data"
	@echo "make test       set up, build, and run every test"
	@echo "make test-long  the same at full scale with the tests that are too long for every run, the fuzz targets for a"
	@echo "                minute each, lint and test-aarch64"
	@echo "make test-asan  every test under the address and undefined-behaviour sanitizers, a tenth of the exhaustive sets"
	@echo "make test-tsan  the tests of attention under the thread sanitizer (needs clang), a twentieth of the exhaustive"
	@echo "                sets"
	@echo "make test-aarch64  the C++ tests of masks, plans and attention for aarch64, under qemu"
	@echo "make lint       clang-tidy over src"
	@echo "make fuzz       fuzz the readers of files, the masks and the C structs for FLASHMASK_FUZZ_SECONDS, 60 (needs"
	@echo "                clang)"
	@echo "make build      library and command only"
	@echo "make wheel      the Python package for any Linux with glibc 2.28 or later, in dist/"
	@echo "make install    install them (PREFIX=/usr/local)"
	@echo "make uninstall  remove what the last make install wrote"
	@echo "make gallery    write docs/gallery.md and draw docs/img anew"
	@echo "make format     format all sources (clang-format, ruff)"
	@echo "make clean      remove build/"
	@echo
	@echo "CUDA=auto|on|off  whether the CUDA backend is built. auto, the default of demo and tests: where a GPU's driver"
	@echo "                  is found; build, wheel and install have it where a CUDA compiler is found"

build:
	$(build_command)

wheel:
	scripts/setup wheel
	scripts/build-wheel build/wheel/venv/bin/python build/wheel dist \
	  --config-settings=cmake.define.FLASHMASK_CUDA=$(or $(CUDA),COMPILER)

demo:
	$(build_command)
	scripts/demo $(FLASHMASK)

test:
	scripts/setup test $(CUDA)
	$(configure) release $(cuda_options)
	cmake --build --preset release
	FLASHMASK_TEST_SCALE=$${FLASHMASK_TEST_SCALE:-25} ctest --preset release

# Variables set here also hold for the prerequisites.
test-long: export FLASHMASK_TEST_LONG = 1
test-long: export FLASHMASK_TEST_SCALE = 100
test-long: export FLASHMASK_FUZZ_SECONDS ?= 360
test-long: test fuzz lint test-aarch64

test-asan:
	scripts/setup test $(CUDA)
	$(configure) asan $(cuda_options)
	cmake --build --preset asan
	FLASHMASK_TEST_SCALE=$${FLASHMASK_TEST_SCALE:-10} ctest --preset asan

test-tsan:
	scripts/setup fuzz
	$(configure) tsan
	cmake --build --preset tsan
	FLASHMASK_TEST_SCALE=$${FLASHMASK_TEST_SCALE:-5} ctest --preset tsan

# A fifth of the cases, in long runs too: qemu takes many times as long as the machine.
test-aarch64:
	scripts/setup-aarch64
	$(configure) aarch64
	cmake --build --preset aarch64
	FLASHMASK_TEST_SCALE=20 ctest --preset aarch64

lint:
	scripts/setup test $(CUDA)
	$(configure) release $(cuda_options)
	scripts/lint build/release

fuzz:
	scripts/setup fuzz
	$(configure) fuzz
	cmake --build --preset fuzz
	tests/fuzz/run build/fuzz

PREFIX ?= /usr/local
install: build
	cmake --install build/release --prefix $(PREFIX)

uninstall:
	cmake --build build/release --target uninstall

gallery: build
	scripts/draw-gallery $(FLASHMASK)

format:
	scripts/setup test
	scripts/check-style --fix

clean:
	rm -rf build
