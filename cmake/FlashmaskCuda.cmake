# SPDX-License-Identifier: Apache-2.0

# FLASHMASK_CUDA_FOUND: whether there is a CUDA compiler, on the path or where NVIDIA's installers, or scripts/setup, put it.
if(CMAKE_CUDA_COMPILER)
  set(FLASHMASK_NVCC ${CMAKE_CUDA_COMPILER} CACHE FILEPATH "nvcc")
elseif(DEFINED ENV{CUDACXX})
  set(FLASHMASK_NVCC $ENV{CUDACXX} CACHE FILEPATH "nvcc")
else()
  find_program(FLASHMASK_NVCC nvcc HINTS ENV CUDA_PATH ENV CUDA_HOME PATHS /usr/local/cuda ${PROJECT_SOURCE_DIR}/build/cuda PATH_SUFFIXES bin)
endif()
if(FLASHMASK_NVCC)
  set(FLASHMASK_CUDA_FOUND ON)
else()
  set(FLASHMASK_CUDA_FOUND OFF)
endif()

# Sets what enable_language(CUDA) reads. The kernels use instructions of Hopper alone, hence 90a.
macro(flashmask_enable_cuda)
  if(NOT FLASHMASK_NVCC)
    message(FATAL_ERROR "FLASHMASK_CUDA is on and no CUDA compiler was found; put nvcc on the path or set CMAKE_CUDA_COMPILER")
  endif()
  # Asked for before enable_language(CUDA), which would say no more than that an older nvcc does not compile.
  execute_process(COMMAND ${FLASHMASK_NVCC} --version OUTPUT_VARIABLE flashmask_nvcc_version)
  if(flashmask_nvcc_version MATCHES "release ([0-9]+\\.[0-9]+)")
    if(CMAKE_MATCH_1 VERSION_LESS 12.4)
      message(FATAL_ERROR "${FLASHMASK_NVCC} is of CUDA ${CMAKE_MATCH_1}; the CUDA backend needs 12.4 or later (-DFLASHMASK_CUDA=OFF leaves it out)")
    endif()
  endif()
  set(CMAKE_CUDA_COMPILER ${FLASHMASK_NVCC})
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a-real)
  endif()
endmacro()

# Adds a translation unit FOLDER/instance.cu.in for each row ROW{head_dim, head_dim_v, consumers, ...} of tile_config.h beside FOLDER and
# each element type. ID is what the ids of its kernels begin with: sm90.fwd.
function(flashmask_kernel_instances target folder row_type id_begin)
  get_filename_component(table ${folder}/../tile_config.h ABSOLUTE)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${table})
  file(STRINGS ${table} rows REGEX "^ *${row_type}{")
  if(NOT rows)
    message(FATAL_ERROR "${table} has no row that begins with ${row_type}{")
  endif()
  foreach(row IN LISTS rows)
    if(NOT row MATCHES "${row_type}{([0-9]+), ([0-9]+), ([0-9]+),")
      message(FATAL_ERROR "${table}: '${row}' does not begin with head_dim, head_dim_v, consumers")
    endif()
    set(head_dim ${CMAKE_MATCH_1})
    set(head_dim_v ${CMAKE_MATCH_2})
    set(consumers ${CMAKE_MATCH_3})
    foreach(element dtype IN ZIP_LISTS FLASHMASK_ELEMENTS FLASHMASK_DTYPES)
      set(id "${id_begin}.${element}.d${head_dim}.dv${head_dim_v}.c${consumers}")
      string(REPLACE "." "_" name "flashmask.${id}")
      set(file ${CMAKE_CURRENT_BINARY_DIR}/${folder}/${name}.cu)
      configure_file(${folder}/instance.cu.in ${file} @ONLY)
      target_sources(${target} PRIVATE ${file})
    endforeach()
  endforeach()
endfunction()
# The element types of the kernels, as their sources and as the API call them.
set(FLASHMASK_ELEMENTS bf16 f16)
set(FLASHMASK_DTYPES kBFloat16 kFloat16)

set(FLASHMASK_PTXAS_ALLOW ${PROJECT_SOURCE_DIR}/src/backends/cuda/ptxas-allow.txt CACHE FILEPATH "Spills and wgmma serialisation that do not fail the build")
mark_as_advanced(FLASHMASK_PTXAS_ALLOW)

# How the .cu files of a target are compiled. Spills and wgmma serialisation that FLASHMASK_PTXAS_ALLOW does not list fail
# the build, unless it is of CUDA before 12.8, whose ptxas spills a few registers whatever one does: there it only warns.
function(flashmask_cuda_target target)
  set_target_properties(${target} PROPERTIES
    LINKER_LANGUAGE CXX
    CUDA_VISIBILITY_PRESET hidden
    CUDA_RUNTIME_LIBRARY None)
  # -std in words: CMake 3.25 knows no C++20 for nvcc.
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;-O3;-Xptxas=-warn-spills;-Xcompiler=-Wall>")
  if(FLASHMASK_WERROR)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>")
  endif()
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    set(check ${PROJECT_SOURCE_DIR}/scripts/check-ptxas)
    set(allowed ${FLASHMASK_PTXAS_ALLOW})
    set_target_properties(${target} PROPERTIES CUDA_COMPILER_LAUNCHER "${check};${allowed}")
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
    get_target_property(sources ${target} SOURCES)
    list(FILTER sources INCLUDE REGEX "\\.cu$")
    set_source_files_properties(${sources} TARGET_DIRECTORY ${target} PROPERTIES OBJECT_DEPENDS "${check};${allowed}")
  endif()
endfunction()
