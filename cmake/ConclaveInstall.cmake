# Install rules: library, public headers, tuning tables, CMake package, pkg-config file.
include(CMakePackageConfigHelpers)

install(
  TARGETS conclave
  EXPORT conclaveTargets
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT runtime
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime NAMELINK_COMPONENT development
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
install(
  DIRECTORY ${PROJECT_SOURCE_DIR}/include/conclave
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  COMPONENT development
  FILES_MATCHING
  PATTERN "*.h")
install(
  FILES ${PROJECT_SOURCE_DIR}/LICENSE
  DESTINATION ${CMAKE_INSTALL_DOCDIR}
  COMPONENT runtime)
# For --tuning and TuningTable::load.
install(
  FILES ${PROJECT_SOURCE_DIR}/share/tuning/nvidia-h200.txt
  DESTINATION ${CMAKE_INSTALL_DATADIR}/conclave/tuning
  COMPONENT runtime)

# A static library leaves its CUDA runtime to the link of what uses it.
set(CONCLAVE_FIND_CUDA_RUNTIME "")
set(conclave_pc_cuda_libraries "")
if(CONCLAVE_HAS_CUDA AND NOT BUILD_SHARED_LIBS)
  set(CONCLAVE_FIND_CUDA_RUNTIME "find_dependency(CUDAToolkit)")
  get_target_property(cudart CUDA::cudart_static IMPORTED_LOCATION)
  set(conclave_pc_cuda_libraries " ${cudart} -lrt -ldl")
endif()

set(CONCLAVE_FIND_MPI "")
set(conclave_pc_mpi_libraries "")
if(CONCLAVE_HAS_MPI AND NOT BUILD_SHARED_LIBS)
  set(CONCLAVE_FIND_MPI "find_dependency(MPI COMPONENTS CXX)")
  list(JOIN MPI_CXX_LIBRARIES " " mpi_libraries)
  set(conclave_pc_mpi_libraries " ${mpi_libraries}")
endif()

set(conclave_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/conclave)
install(
  EXPORT conclaveTargets
  NAMESPACE conclave::
  DESTINATION ${conclave_package_dir}
  COMPONENT development)
configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/conclaveConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/conclaveConfig.cmake
  INSTALL_DESTINATION ${conclave_package_dir}
  NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(
  ${CMAKE_CURRENT_BINARY_DIR}/conclaveConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES ${CMAKE_CURRENT_BINARY_DIR}/conclaveConfig.cmake
        ${CMAKE_CURRENT_BINARY_DIR}/conclaveConfigVersion.cmake
  DESTINATION ${conclave_package_dir}
  COMPONENT development)

# The prefix is found from the place of the .pc file, so that an installed tree can be moved.
file(RELATIVE_PATH conclave_pc_to_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig
     ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" conclave_pc_to_prefix "${conclave_pc_to_prefix}")
set(conclave_pc_static_flag "")
set(conclave_pc_libraries "-lconclave")
if(NOT BUILD_SHARED_LIBS)
  set(conclave_pc_static_flag " -DCONCLAVE_STATIC")
  # Programs of C and Rust are linked without the runtime of C++.
  set(runtime ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES})
  list(FILTER runtime INCLUDE REGEX "^((std)?c\\+\\+|m)$")
  list(REMOVE_DUPLICATES runtime)
  list(TRANSFORM runtime PREPEND " -l")
  list(JOIN runtime "" runtime)
  string(APPEND conclave_pc_libraries
         "${conclave_pc_cuda_libraries}${conclave_pc_mpi_libraries} -pthread${runtime}")
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/conclave.pc.in ${CMAKE_CURRENT_BINARY_DIR}/conclave.pc
               @ONLY)
install(
  FILES ${CMAKE_CURRENT_BINARY_DIR}/conclave.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
  COMPONENT development)
