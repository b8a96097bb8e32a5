# SPDX-License-Identifier: Apache-2.0
file(REMOVE_RECURSE ${WORK_DIR})
function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()
function(output_of variable)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE text OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(${variable} ${text} PARENT_SCOPE)
endfunction()

# As the component that everything belongs to: whoever installed this build keeps the list that uninstalls it.
run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${WORK_DIR}/first --component Unspecified)
# Moved away, so that the test fails if the package holds a path of where it was built or installed.
set(prefix ${WORK_DIR}/moved)
file(RENAME ${WORK_DIR}/first ${prefix})
file(GLOB_RECURSE descriptions ${prefix}/*.cmake ${prefix}/*.pc)
foreach(file IN LISTS descriptions)
  file(READ ${file} text)
  string(FIND "${text}" ${BUILD_DIR} found)
  if(NOT found EQUAL -1)
    message(FATAL_ERROR "${file} names ${BUILD_DIR}")
  endif()
endforeach()

set(flags)
if(SANITIZE)
  set(flags -fsanitize=${SANITIZE})
endif()

# CMake
run(${CMAKE_COMMAND} -S ${CONSUMER_DIR} -B ${WORK_DIR}/cmake -DCMAKE_PREFIX_PATH=${prefix} -DCMAKE_C_COMPILER=${CC}
  -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_C_FLAGS=${flags} -DCMAKE_CXX_FLAGS=${flags})
run(${CMAKE_COMMAND} --build ${WORK_DIR}/cmake)
run(${WORK_DIR}/cmake/consumer_cpp)
run(${WORK_DIR}/cmake/consumer_c)

# pkg-config
file(GLOB_RECURSE pc ${prefix}/*/flashmask.pc ${prefix}/*/flashmask-static.pc)
get_filename_component(pc_folder ${pc} DIRECTORY)
get_filename_component(package ${pc} NAME_WE)
set(ENV{PKG_CONFIG_PATH} ${pc_folder})
run(${PKG_CONFIG} --exact-version=${VERSION} ${package} flashmask-draw)
output_of(libdir ${PKG_CONFIG} --variable=libdir ${package})
output_of(cflags ${PKG_CONFIG} --cflags ${package})
output_of(libs ${PKG_CONFIG} --libs ${package})
output_of(draw_libs ${PKG_CONFIG} --libs flashmask-draw ${package})
message(STATUS "pkg-config: ${cflags} | ${draw_libs}")
foreach(list IN ITEMS cflags libs draw_libs)
  separate_arguments(${list} UNIX_COMMAND "${${list}}")
endforeach()
file(MAKE_DIRECTORY ${WORK_DIR}/pkgconfig)
set(rpath -Wl,-rpath,${libdir})
run(${CC} -std=c11 ${flags} ${cflags} ${CONSUMER_DIR}/main.c ${CONSUMER_DIR}/layout.c
  -o ${WORK_DIR}/pkgconfig/consumer_c ${libs} -lm ${rpath})
run(${CXX} -std=c++20 ${flags} ${cflags} ${CONSUMER_DIR}/main.cpp
  -o ${WORK_DIR}/pkgconfig/consumer_cpp ${draw_libs} ${rpath})
run(${WORK_DIR}/pkgconfig/consumer_c)
run(${WORK_DIR}/pkgconfig/consumer_cpp)

if(EXISTS ${prefix}/bin/flashmask)
  run(${prefix}/bin/flashmask info)
endif()

# The list has all that was installed, and nothing else.
file(RENAME ${prefix} ${WORK_DIR}/first)
run(${CMAKE_COMMAND} -DMANIFEST=${BUILD_DIR}/install_manifest_Unspecified.txt -P ${UNINSTALL})
file(GLOB_RECURSE left ${WORK_DIR}/first/*)
if(left)
  message(FATAL_ERROR "not uninstalled: ${left}")
endif()
