// SPDX-License-Identifier: Apache-2.0
#pragma once

// The one place where the version is written; CMake reads it from here.
#define FLASHMASK_VERSION_MAJOR 0
#define FLASHMASK_VERSION_MINOR 1
#define FLASHMASK_VERSION_PATCH 0
