// SPDX-License-Identifier: Apache-2.0
#pragma once

// The library is built with hidden visibility: what carries this mark is its interface.
#if defined(__GNUC__)
#define FLASHMASK_API __attribute__((visibility("default")))
#else
#define FLASHMASK_API
#endif
