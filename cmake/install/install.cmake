# SPDX-License-Identifier: Apache-2.0
# All of packaging: what is installed and where, and what lets others rely on the installed library.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(abi_version ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
set_target_properties(flashmask PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${abi_version})
set(generated ${PROJECT_BINARY_DIR}/packaging)

install(TARGETS flashmask EXPORT flashmaskTargets INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/flashmask DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET flashmask_cli)
  # Relative, so that the command finds the library wherever both are moved.
  file(RELATIVE_PATH bin_to_lib ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
  set_target_properties(flashmask_cli PROPERTIES INSTALL_RPATH "$ORIGIN/${bin_to_lib}")
  install(TARGETS flashmask_cli)
endif()

# For CMake's find_package.
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/flashmask)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/flashmaskConfig.cmake.in ${generated}/flashmaskConfig.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${generated}/flashmaskConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${generated}/flashmaskConfig.cmake ${generated}/flashmaskConfigVersion.cmake DESTINATION ${package_dir})
install(EXPORT flashmaskTargets NAMESPACE flashmask:: DESTINATION ${package_dir})
