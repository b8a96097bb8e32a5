// SPDX-License-Identifier: Apache-2.0
#include "show/png.h"

#include <fmt/format.h>
#include <png.h>

#include "flashmask/status.h"

namespace flashmask::show {

std::string to_png(const Pixels& pixels) {
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.width = static_cast<png_uint_32>(pixels.width);
  image.height = static_cast<png_uint_32>(pixels.height);
  image.format = PNG_FORMAT_RGB;
  png_alloc_size_t size = PNG_IMAGE_PNG_SIZE_MAX(image);
  std::string file(size, '\0');
  if (!png_image_write_to_memory(&image, file.data(), &size, 0, pixels.rgb.data(), 0, nullptr)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("libpng cannot write {} x {} pixels: {}", pixels.width, pixels.height, image.message));
  }
  file.resize(size);
  return file;
}

}  // namespace flashmask::show
