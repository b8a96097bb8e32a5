# SPDX-License-Identifier: Apache-2.0
# Prints whether FLASHMASK_CUDA builds the CUDA backend, and why.
include(${PROJECT_SOURCE_DIR}/cmake/FlashmaskCuda.cmake)
message("${FLASHMASK_WITH_CUDA}: ${FLASHMASK_CUDA_WHY}")
