# SPDX-License-Identifier: Apache-2.0

# Compile settings of every target of this project.
function(flashmask_target target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF
    CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON)
  set(host "$<COMPILE_LANGUAGE:C,CXX>")  # nvcc takes other options
  target_compile_options(${target} PRIVATE "$<${host}:-Wall;-Wextra;-Wshadow;-Wconversion;-Wno-sign-conversion>")
  if(FLASHMASK_WERROR)
    target_compile_options(${target} PRIVATE "$<${host}:-Werror>")
  endif()
  if(FLASHMASK_SANITIZE)
    target_compile_options(${target} PRIVATE
      "$<${host}:-fsanitize=${FLASHMASK_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=all>"
      # GCC's manual: sanitizers cause false positives of this warning.
      "$<${host}:$<$<CXX_COMPILER_ID:GNU>:-Wno-error=maybe-uninitialized>>")
    target_link_options(${target} PRIVATE -fsanitize=${FLASHMASK_SANITIZE})
  endif()
endfunction()
