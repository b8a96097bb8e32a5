// SPDX-License-Identifier: Apache-2.0
#pragma once

// The whole C++ interface, except draw.h, which is a library of its own.
#include "flashmask/attention.h"
#include "flashmask/builders.h"
#include "flashmask/float16.h"
#include "flashmask/inspect.h"
#include "flashmask/kv_cache.h"
#include "flashmask/mask.h"
#include "flashmask/model_masks.h"
#include "flashmask/placement.h"
#include "flashmask/plan.h"
#include "flashmask/status.h"
#include "flashmask/tensor.h"
#include "flashmask/tiles.h"
#include "flashmask/version.h"
