# Programs of C, which the tests and examples of the C interface are. Their compiler comes with that of
# C++, so that both know the same sanitizers.
if(NOT CMAKE_C_COMPILER)
  string(REGEX REPLACE "clang\\+\\+" "clang" conclave_c_compiler "${CMAKE_CXX_COMPILER}")
  string(REGEX REPLACE "g\\+\\+" "gcc" conclave_c_compiler "${conclave_c_compiler}")
  if(NOT conclave_c_compiler STREQUAL CMAKE_CXX_COMPILER AND EXISTS "${conclave_c_compiler}")
    set(CMAKE_C_COMPILER ${conclave_c_compiler})
  endif()
endif()
enable_language(C)

# conclave_add_c_program(<target> <file>...)
#
# Linked as C++ is, whose runtime a static library needs.
function(conclave_add_c_program name)
  add_executable(${name} ${ARGN})
  set_target_properties(${name} PROPERTIES C_STANDARD 99 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF
                                           LINKER_LANGUAGE CXX)
  target_compile_options(${name} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Werror)
  target_link_libraries(${name} PRIVATE conclave::conclave m)
endfunction()
