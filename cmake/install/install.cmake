# SPDX-License-Identifier: Apache-2.0
# All of packaging: installed files and their places, and the rules that let others rely on the library (docs/abi.md).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(abi_version ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
set_target_properties(flashmask PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${abi_version})
set(generated ${PROJECT_BINARY_DIR}/packaging)

# Hidden visibility does not reach the standard library's templates; the version script does.
if(BUILD_SHARED_LIBS AND UNIX AND NOT APPLE)
  configure_file(${CMAKE_CURRENT_LIST_DIR}/symbols.map.in ${generated}/symbols.map @ONLY)
  target_link_options(flashmask PRIVATE "LINKER:--version-script=${generated}/symbols.map")
  set_property(TARGET flashmask APPEND PROPERTY LINK_DEPENDS ${generated}/symbols.map)
endif()

# A shared and a static build can be installed into one prefix, so files that differ between them have different names.
set(linkage static)
if(BUILD_SHARED_LIBS)
  set(linkage shared)
endif()

install(TARGETS flashmask EXPORT flashmask-${linkage}-targets INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS flashmask_draw EXPORT flashmask-draw-targets INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/flashmask DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET flashmask_cli)
  # Relative, so that the command finds the library wherever both are moved.
  file(RELATIVE_PATH bin_to_lib ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
  set_target_properties(flashmask_cli PROPERTIES INSTALL_RPATH "$ORIGIN/${bin_to_lib}")
  install(TARGETS flashmask_cli)
endif()

# For CMake's find_package.
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/flashmask)
configure_file(${CMAKE_CURRENT_LIST_DIR}/flashmask-linkage.cmake.in ${generated}/flashmask-${linkage}.cmake @ONLY)
write_basic_package_version_file(${generated}/flashmaskConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_LIST_DIR}/flashmaskConfig.cmake ${generated}/flashmaskConfigVersion.cmake
  ${generated}/flashmask-${linkage}.cmake
  DESTINATION ${package_dir})
foreach(targets IN ITEMS ${linkage} draw)
  install(EXPORT flashmask-${targets}-targets NAMESPACE flashmask:: DESTINATION ${package_dir})
endforeach()

# For pkg-config: flashmask, or flashmask-static with everything that a C compiler must also link; and flashmask-draw,
# which precedes either on the command line.
set(pkgconfig_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH pc_to_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" pc_to_prefix ${pc_to_prefix})
file(RELATIVE_PATH pc_libdir ${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_FULL_LIBDIR})
file(RELATIVE_PATH pc_includedir ${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_FULL_INCLUDEDIR})
# flashmask_pkgconfig(NAME NOTE REQUIRES LIBRARY...)
function(flashmask_pkgconfig pc_name pc_note pc_requires)
  list(TRANSFORM ARGN PREPEND -l REGEX "^[^/]" OUTPUT_VARIABLE pc_libs)
  list(JOIN pc_libs " " pc_libs)
  configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/flashmask.pc.in ${generated}/${pc_name}.pc @ONLY)
  install(FILES ${generated}/${pc_name}.pc DESTINATION ${pkgconfig_dir})
endfunction()

if(BUILD_SHARED_LIBS)
  flashmask_pkgconfig(flashmask "" "" flashmask)
else()
  set(static_requires "")
  set(static_libs :libflashmask.a)
  if(FLASHMASK_CPU)
    set(static_requires libhwy)
    list(APPEND static_libs ${OpenMP_CXX_LIB_NAMES})
  endif()
  if(FLASHMASK_WITH_CUDA)
    get_target_property(cudart CUDA::cudart_static IMPORTED_LOCATION)
    list(APPEND static_libs ${cudart} rt pthread dl)
  endif()
  set(cxx_libs ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES})
  list(REMOVE_ITEM cxx_libs ${CMAKE_C_IMPLICIT_LINK_LIBRARIES})
  flashmask_pkgconfig(flashmask-static " (the static library)" "${static_requires}" ${static_libs} ${cxx_libs})
endif()
flashmask_pkgconfig(flashmask-draw ": drawings of masks, to be named before flashmask or flashmask-static" ""
  flashmask_draw)

if(PROJECT_IS_TOP_LEVEL)
  add_custom_target(uninstall
    COMMAND ${CMAKE_COMMAND} -DMANIFEST=${PROJECT_BINARY_DIR}/install_manifest.txt
      -P ${CMAKE_CURRENT_LIST_DIR}/uninstall.cmake
    VERBATIM)
endif()
