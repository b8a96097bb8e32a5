// SPDX-License-Identifier: Apache-2.0
#pragma once

// The library is built with hidden visibility: this mark makes a symbol part of its interface.
#if defined(__GNUC__)
#define FLASHMASK_API __attribute__((visibility("default")))
#else
#define FLASHMASK_API
#endif
