# SPDX-License-Identifier: Apache-2.0
set(FLASHMASK_PYTHON "" CACHE FILEPATH
  "Python with NVIDIA's compiler and, for the tests, the packages of tests/*/requirements.txt")

# flashmask_python_package(VARIABLE PACKAGE): the folder of a package of the Python that builds, FLASHMASK_PYTHON if it
# exists and else the one that CMake finds; empty if there is none.
function(flashmask_python_package variable package)
  set(python ${FLASHMASK_PYTHON})
  if(NOT EXISTS "${python}")
    find_package(Python3 QUIET COMPONENTS Interpreter)
    set(python ${Python3_EXECUTABLE})
  endif()
  set(folder "")
  if(python)
    # The package is not imported: with torch that would take seconds, and a GPU machine's driver.
    execute_process(COMMAND ${python} -c
        "import importlib.util; print(*importlib.util.find_spec('${package}').submodule_search_locations, sep=';')"
      OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  if(folder)
    list(GET folder 0 folder)
  endif()
  set(${variable} "${folder}" PARENT_SCOPE)
endfunction()
