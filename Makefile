# SPDX-License-Identifier: Apache-2.0
# Each target is the commands that one would type.

PYTHON := $(CURDIR)/build/venv/bin/python
FLASHMASK := build/release/bin/flashmask

.PHONY: help demo test test-long test-asan test-tsan fuzz build wheel install uninstall gallery format clean

help:
	@echo "make demo       set up, build, and run the main job on the example data"
	@echo "make test       set up, build, and run every test"
	@echo "make test-long  the same at full scale with the tests that are too long for every run, and the fuzz"
	@echo "                targets for a minute each"
	@echo "make test-asan  every test under the address and undefined-behaviour sanitizers, a tenth of the exhaustive sets"
	@echo "make test-tsan  the tests of attention under the thread sanitizer (needs clang), a twentieth of the exhaustive"
	@echo "                sets"
	@echo "make fuzz       fuzz the readers of files, the masks and the C structs for FLASHMASK_FUZZ_SECONDS, 60 (needs"
	@echo "                clang)"
	@echo "make build      library and command only"
	@echo "make wheel      the Python package for any Linux with glibc 2.28 or later, in dist/"
	@echo "make install    install them (PREFIX=/usr/local)"
	@echo "make uninstall  remove what the last make install wrote"
	@echo "make gallery    write docs/gallery.md and draw docs/img anew"
	@echo "make format     format all sources (clang-format, ruff)"
	@echo "make clean      remove build/"

build:
	scripts/setup build
	cmake --preset demo -Wno-dev --log-level=WARNING
	cmake --build --preset demo

wheel:
	scripts/setup wheel
	scripts/build-wheel build/wheel/venv/bin/python build/wheel dist

demo: build
	scripts/demo $(FLASHMASK)

test:
	scripts/setup test
	cmake --preset release -Wno-dev --log-level=WARNING -DFLASHMASK_TESTS=ON -DFLASHMASK_PYTHON=$(PYTHON)
	cmake --build --preset release
	ctest --preset release

# What is set here holds for what it is made of.
test-long: export FLASHMASK_TEST_LONG = 1
test-long: export FLASHMASK_TEST_SCALE = 100
test-long: export FLASHMASK_FUZZ_SECONDS ?= 360
test-long: test fuzz

test-asan:
	scripts/setup test
	cmake --preset asan -Wno-dev --log-level=WARNING -DFLASHMASK_PYTHON=$(PYTHON)
	cmake --build --preset asan
	FLASHMASK_TEST_SCALE=$${FLASHMASK_TEST_SCALE:-10} ctest --preset asan

test-tsan:
	scripts/setup fuzz
	cmake --preset tsan -Wno-dev --log-level=WARNING
	cmake --build --preset tsan
	FLASHMASK_TEST_SCALE=$${FLASHMASK_TEST_SCALE:-5} ctest --preset tsan

fuzz:
	scripts/setup fuzz
	cmake --preset fuzz -Wno-dev --log-level=WARNING
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
