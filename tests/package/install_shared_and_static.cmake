# SPDX-License-Identifier: Apache-2.0
# Installs a shared and a static build into one prefix, in both orders: neither replaces the other, and a program
# selects one.
function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

set(flags)
if(SANITIZE)
  set(flags -fsanitize=${SANITIZE})
endif()

# configure(RESULT PREFIX NAME OPTION...): configures the consumer in WORK_DIR/NAME.
function(configure result prefix name)
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${CONSUMER_DIR} -B ${WORK_DIR}/${name} -DCMAKE_PREFIX_PATH=${prefix}
      -DCMAKE_C_COMPILER=${CC} -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_C_FLAGS=${flags} -DCMAKE_CXX_FLAGS=${flags} ${ARGN}
    RESULT_VARIABLE status OUTPUT_VARIABLE text ERROR_VARIABLE text)
  set(${result} ${status} PARENT_SCOPE)
  set(text "${text}" PARENT_SCOPE)
endfunction()

# expect(LINKAGE PREFIX NAME OPTION...): the programs built with these options run, with that library.
function(expect linkage prefix name)
  configure(status ${prefix} ${name} ${ARGN})
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${name}: ${text}")
  endif()
  run(${CMAKE_COMMAND} --build ${WORK_DIR}/${name})
  foreach(program IN ITEMS consumer_cpp consumer_c)
    run(${WORK_DIR}/${name}/${program})
    execute_process(COMMAND ${READELF} -dW ${WORK_DIR}/${name}/${program} OUTPUT_VARIABLE dynamic
      COMMAND_ERROR_IS_FATAL ANY)
    set(found static)
    if(dynamic MATCHES "NEEDED[^\n]*libflashmask\\.so")
      set(found shared)
    endif()
    if(NOT found STREQUAL linkage)
      message(FATAL_ERROR "${name}: ${program} is linked with the ${found} library, not the ${linkage} one")
    endif()
  endforeach()
endfunction()

file(REMOVE_RECURSE ${WORK_DIR})
foreach(order IN ITEMS "SHARED;STATIC" "STATIC;SHARED")
  list(JOIN order _ prefix_name)
  set(prefix ${WORK_DIR}/${prefix_name})
  foreach(build IN LISTS order)
    # As a component, so that the build's own list of what was installed stays as it is.
    run(${CMAKE_COMMAND} --install ${${build}_BUILD} --prefix ${prefix} --component Unspecified)
  endforeach()
endforeach()
expect(shared ${WORK_DIR}/SHARED_STATIC default)
expect(shared ${WORK_DIR}/SHARED_STATIC variable_shared -Dflashmask_SHARED_LIBS=ON)
expect(static ${WORK_DIR}/SHARED_STATIC variable_static -Dflashmask_SHARED_LIBS=OFF)
expect(static ${WORK_DIR}/STATIC_SHARED component_static -DCONSUMER_COMPONENTS=static,draw -Dflashmask_SHARED_LIBS=ON)
expect(shared ${WORK_DIR}/STATIC_SHARED component_shared -DCONSUMER_COMPONENTS=shared)

# refused(WORDS PREFIX NAME OPTION...)
function(refused words prefix name)
  configure(status ${prefix} ${name} ${ARGN})
  string(REGEX REPLACE "[ \n]+" " " text "${text}")
  if(status EQUAL 0 OR NOT text MATCHES ${words})
    message(FATAL_ERROR "${name}: not refused with '${words}': ${status}, ${text}")
  endif()
endfunction()
refused("exclude each other" ${WORK_DIR}/SHARED_STATIC both -DCONSUMER_COMPONENTS=static,shared)
refused("no component python" ${WORK_DIR}/SHARED_STATIC unknown -DCONSUMER_COMPONENTS=python)
run(${CMAKE_COMMAND} --install ${STATIC_BUILD} --prefix ${WORK_DIR}/static --component Unspecified)
refused("the shared library was asked for" ${WORK_DIR}/static missing -DCONSUMER_COMPONENTS=shared)

# pkg-config finds both.
file(GLOB_RECURSE pc ${WORK_DIR}/STATIC_SHARED/*/flashmask.pc)
get_filename_component(pc_folder ${pc} DIRECTORY)
set(ENV{PKG_CONFIG_PATH} ${pc_folder})
run(${PKG_CONFIG} --exists --print-errors flashmask flashmask-static flashmask-draw)
