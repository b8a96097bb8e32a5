# SPDX-License-Identifier: Apache-2.0
include(${CMAKE_CURRENT_LIST_DIR}/FlashmaskPython.cmake)

# The nvcc of NVIDIA's Python packages (pyproject.toml names them), if the Python that builds has them. nvcc looks for
# its libraries in lib64 and CMake for a libcudart.so without a number; the packages have neither, so links in the build
# folder stand in.
function(flashmask_nvcc_of_python variable toolkit)
  flashmask_python_package(wheels nvidia.cu13)
  if(NOT EXISTS ${wheels}/bin/nvcc)
    set(${variable} NOTFOUND PARENT_SCOPE)
    return()
  endif()
  file(REMOVE_RECURSE ${toolkit})
  file(MAKE_DIRECTORY ${toolkit}/bin ${toolkit}/lib64)
  file(GLOB programs RELATIVE ${wheels} ${wheels}/bin/*)
  foreach(name IN LISTS programs ITEMS include nvvm)
    file(CREATE_LINK ${wheels}/${name} ${toolkit}/${name} SYMBOLIC)
  endforeach()
  file(GLOB libraries RELATIVE ${wheels}/lib ${wheels}/lib/libcuda*)
  foreach(name IN LISTS libraries)
    string(REGEX REPLACE "\\.so\\..*" ".so" unnumbered ${name})
    file(CREATE_LINK ${wheels}/lib/${name} ${toolkit}/lib64/${unnumbered} SYMBOLIC)
  endforeach()
  set(${variable} ${toolkit}/bin/nvcc PARENT_SCOPE)
endfunction()

# FLASHMASK_NVCC: the CUDA compiler, NOTFOUND if there is none: on the path, where NVIDIA's installers put it, or among
# the Python packages.
set(flashmask_cuda_toolkit ${PROJECT_BINARY_DIR}/cuda-toolkit)
if(CMAKE_CUDA_COMPILER AND NOT CMAKE_CUDA_COMPILER MATCHES "^${flashmask_cuda_toolkit}/")
  set(FLASHMASK_NVCC ${CMAKE_CUDA_COMPILER})
elseif(DEFINED ENV{CUDACXX})
  set(FLASHMASK_NVCC $ENV{CUDACXX})
else()
  find_program(FLASHMASK_NVCC nvcc HINTS ENV CUDA_PATH ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(NOT FLASHMASK_NVCC)
    flashmask_nvcc_of_python(FLASHMASK_NVCC ${flashmask_cuda_toolkit})
  endif()
endif()

# FLASHMASK_WITH_CUDA: whether the CUDA backend is built, by FLASHMASK_CUDA; FLASHMASK_CUDA_WHY: why, in words.
set(FLASHMASK_CUDA COMPILER CACHE STRING
  "Build the CUDA backend: ON, OFF, COMPILER (where nvcc is found), or AUTO (where a GPU's driver is found, too)")
string(TOUPPER "${FLASHMASK_CUDA}" flashmask_asked)
set(flashmask_with_cuda OFF)
if(flashmask_asked MATCHES "^(ON|TRUE|YES|1)$")
  set(flashmask_with_cuda ON)
  set(FLASHMASK_CUDA_WHY "asked for")
elseif(flashmask_asked MATCHES "^(OFF|FALSE|NO|0)$")
  set(FLASHMASK_CUDA_WHY "turned off")
elseif(flashmask_asked MATCHES "^(AUTO|COMPILER)$")
  set(driver "")
  if(flashmask_asked STREQUAL "AUTO")
    execute_process(COMMAND ${PROJECT_SOURCE_DIR}/scripts/find-gpu-driver
      OUTPUT_VARIABLE driver OUTPUT_STRIP_TRAILING_WHITESPACE)
  endif()
  if(flashmask_asked STREQUAL "AUTO" AND NOT driver)
    set(FLASHMASK_CUDA_WHY "CUDA=auto and no GPU driver was found; CUDA=on builds it")
  elseif(NOT FLASHMASK_NVCC)
    set(FLASHMASK_CUDA_WHY "no CUDA compiler was found")
    if(driver)
      string(PREPEND FLASHMASK_CUDA_WHY "CUDA=auto found a GPU driver, ${driver}, but ")
    endif()
  elseif(driver)
    set(flashmask_with_cuda ON)
    set(FLASHMASK_CUDA_WHY "CUDA=auto found a GPU driver, ${driver}")
  else()
    set(flashmask_with_cuda ON)
    set(FLASHMASK_CUDA_WHY "found ${FLASHMASK_NVCC}")
  endif()
else()
  message(FATAL_ERROR "FLASHMASK_CUDA is '${FLASHMASK_CUDA}'; it must be ON, OFF, COMPILER (where nvcc is found) or "
    "AUTO (where a GPU's driver is found, too)")
endif()
# Cached for projects that add this one's folder.
set(FLASHMASK_WITH_CUDA ${flashmask_with_cuda} CACHE INTERNAL "Whether the CUDA backend is built")

# Which kernel sets are built, for what GPUs: sm90 for Hopper, sm80 for Ampere and, as PTX, for everything later.
set(FLASHMASK_KERNELS sm90 sm80 CACHE STRING "Kernel sets to build: sm90, sm80, or both")
foreach(name IN LISTS FLASHMASK_KERNELS)
  if(NOT name MATCHES "^sm(80|90)$")
    message(FATAL_ERROR "FLASHMASK_KERNELS has '${name}'; it takes sm90 and sm80")
  endif()
endforeach()

# Sets the variables that enable_language(CUDA) reads, with the architectures of code that serves every kernel set.
# sm90 uses instructions of Hopper alone, hence 90a.
macro(flashmask_enable_cuda)
  if(NOT FLASHMASK_NVCC)
    message(FATAL_ERROR "FLASHMASK_CUDA is ON and no CUDA compiler was found; put nvcc on the path, set "
      "CMAKE_CUDA_COMPILER, or install NVIDIA's in the Python that builds "
      "(pip install -r <(scripts/build-requirements nvidia-))")
  endif()
  # Asked for before enable_language(CUDA), which would say no more than that an older nvcc does not compile.
  execute_process(COMMAND ${FLASHMASK_NVCC} --version OUTPUT_VARIABLE flashmask_nvcc_version)
  if(flashmask_nvcc_version MATCHES "release ([0-9]+\\.[0-9]+)")
    if(CMAKE_MATCH_1 VERSION_LESS 12.4)
      message(FATAL_ERROR "${FLASHMASK_NVCC} is of CUDA ${CMAKE_MATCH_1}; the CUDA backend needs 12.4 or later "
        "(-DFLASHMASK_CUDA=OFF leaves it out)")
    endif()
  endif()
  set(CMAKE_CUDA_COMPILER ${FLASHMASK_NVCC})
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES ${FLASHMASK_KERNELS})
    list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^sm90$" 90a-real)
    list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^sm80$" 80)
  endif()
endmacro()

# flashmask_kernel_instances(TARGET FOLDER DIRECTION ID COLUMN [UNIT...]): adds a translation unit for each row
# DIRECTIONTile{head_dim, head_dim_v, COLUMN, features, ...} of tile_config.h, in FOLDER or beside it, and each unit
# that its rows DIRECTIONVariant{unit, tiles, suffix, ...} have for that tile. The unit has the kernels of both element
# types: one of FOLDER/instance.cu.in for each variant, and, if it is one of UNIT..., those of FOLDER/rows.cu.in. ID is
# what the ids of the kernels begin with: sm90.fwd. The third column is named in them by its first letter.
# FLASHMASK_ARCHITECTURES_VALUE, if it is set, has the architectures of rows whose third column is VALUE, or those that
# a unit VALUE has besides, as options of nvcc.
function(flashmask_kernel_instances target folder direction id_begin column)
  get_filename_component(table ${folder}/tile_config.h ABSOLUTE)
  if(NOT EXISTS ${table})
    get_filename_component(table ${folder}/../tile_config.h ABSOLUTE)
  endif()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${table})
  file(STRINGS ${table} tiles REGEX "^ *${direction}Tile{")
  file(STRINGS ${table} variants REGEX "^ *${direction}Variant{")
  if(NOT tiles OR NOT variants)
    message(FATAL_ERROR "${table} has no row that begins with ${direction}Tile{, or none with ${direction}Variant{")
  endif()
  string(SUBSTRING ${column} 0 1 letter)
  string(REGEX MATCH "[^/]+/[^/]+$" set_and_direction ${folder})
  foreach(tile IN LISTS tiles)
    if(NOT tile MATCHES "^ *${direction}Tile{([0-9]+), ([0-9]+), ([0-9]+), (k[A-Za-z0-9]+), [^{]*$")
      message(FATAL_ERROR
        "${table}: '${tile}' is not one row that begins with head_dim, head_dim_v, ${column}, features")
    endif()
    set(head_dim ${CMAKE_MATCH_1})
    set(head_dim_v ${CMAKE_MATCH_2})
    set(${column} ${CMAKE_MATCH_3})
    set(features ${CMAKE_MATCH_4})
    set(id "d${head_dim}.dv${head_dim_v}.${letter}${${column}}")
    foreach(unit IN ITEMS kPlain kFeatures kPartial kFloat8)
      string(REGEX REPLACE "^k" "." suffix "${unit}")
      string(TOLOWER "${suffix}" suffix)
      string(REPLACE ".plain" "" suffix "${suffix}")
      set(includes "")
      foreach(element dtype IN ZIP_LISTS FLASHMASK_ELEMENTS FLASHMASK_DTYPES)
        set(variant 0)
        foreach(row IN LISTS variants)
          if(NOT row MATCHES "${direction}Variant{(k[A-Za-z0-9]+), (k[A-Za-z0-9]+), \"([a-z0-9.]*)\"")
            message(FATAL_ERROR "${table}: '${row}' does not begin with unit, tiles, suffix")
          endif()
          set(tiles_of_row kAny ${features})  # as VariantRow::is_of
          if(features STREQUAL kAllAndSharedRows)
            list(APPEND tiles_of_row kAll)
          endif()
          if(CMAKE_MATCH_1 STREQUAL unit AND CMAKE_MATCH_2 IN_LIST tiles_of_row)
            flashmask_configure_kernels(instance "${id_begin}.${element}.${id}${CMAKE_MATCH_3}")
          endif()
          math(EXPR variant "${variant} + 1")
        endforeach()
        if(unit IN_LIST ARGN AND (includes OR unit STREQUAL kPartial))
          flashmask_configure_kernels(rows "${id_begin}.${element}.${id}${suffix}")
        endif()
      endforeach()
      if(includes)
        string(REPLACE "." "_" name "flashmask.${id_begin}.${id}${suffix}")
        set(file ${CMAKE_CURRENT_BINARY_DIR}/${set_and_direction}/${name}.cu)
        file(CONFIGURE OUTPUT ${file} CONTENT "${includes}" @ONLY)
        target_sources(${target} PRIVATE ${file})
        set(architectures ${FLASHMASK_ARCHITECTURES_${${column}}} ${FLASHMASK_ARCHITECTURES_${unit}})
        if(architectures)
          set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "${architectures}")
        endif()
      endif()
    endforeach()
  endforeach()
endfunction()
# flashmask_configure_kernels(TEMPLATE ID): makes the text of the kernels whose ids are or begin with ID, and includes
# it.
macro(flashmask_configure_kernels template id_of_kernels)
  string(REPLACE "." "_" name "flashmask.${id_of_kernels}")
  configure_file(${folder}/${template}.cu.in ${set_and_direction}/${name}.${template}.inl @ONLY)
  string(APPEND includes "#include \"${name}.${template}.inl\"\n")
endmacro()
# The element types of the kernels, as their sources and as the API call them.
set(FLASHMASK_ELEMENTS bf16 f16)
set(FLASHMASK_DTYPES kBFloat16 kFloat16)

set(FLASHMASK_PTXAS_ALLOW ${PROJECT_SOURCE_DIR}/src/backends/cuda/ptxas-allow.txt
  CACHE FILEPATH "Spills and wgmma serialisation that do not fail the build")
mark_as_advanced(FLASHMASK_PTXAS_ALLOW)

# How the .cu files of a target are compiled. Spills and wgmma serialisation that FLASHMASK_PTXAS_ALLOW does not list
# fail the build, unless it is of CUDA before 12.8, whose ptxas spills a few registers whatever one does: there it only
# warns.
function(flashmask_cuda_target target)
  set_target_properties(${target} PROPERTIES
    LINKER_LANGUAGE CXX
    CUDA_VISIBILITY_PRESET hidden
    CUDA_RUNTIME_LIBRARY None)
  # -std in words: CMake 3.25 knows no C++20 for nvcc.
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;-O3;-Xcompiler=-Wall>")
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
  else()
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-warn-spills>)
  endif()
endfunction()
