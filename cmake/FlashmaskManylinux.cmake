# SPDX-License-Identifier: Apache-2.0
# Everything that is added from here on is linked with the stubs of manylinux_stubs.py, which says how.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
set(stubs ${CMAKE_BINARY_DIR}/manylinux)
execute_process(COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/manylinux_stubs.py
  ${stubs} ${CMAKE_CXX_COMPILER} COMMAND_ERROR_IS_FATAL ANY)
# Symbols taken from libstdc++.a stay hidden.
add_link_options(-L${stubs} "LINKER:--exclude-libs,ALL")

# OpenMP's runtime is not on every machine. torch brings one that is linked for manylinux_2_28; under its own name, so
# that a process in which both are loaded has one runtime.
flashmask_python_package(torch torch)
if(NOT EXISTS ${torch}/lib/libgomp.so.1)
  message(FATAL_ERROR "A manylinux wheel takes libgomp.so.1 from torch, which the Python that builds does not have "
    "(${torch}/lib/libgomp.so.1)")
endif()
install(FILES ${torch}/lib/libgomp.so.1 DESTINATION . COMPONENT python)
