# conclave_precompile(<target> <header>...)
#
# Precompiles headers of other projects for the target's sources, except those with an instruction set
# of their own (conclave_isa_source), which could not use them. None of our own headers: a file includes
# what it uses, and a build without this option, which every compiler but GCC up to 12 gets, would fail
# where one does not.
option(CONCLAVE_PRECOMPILE "Precompile headers of other projects (GCC up to 12)" ${PROJECT_IS_TOP_LEVEL})
set(CONCLAVE_STANDARD_HEADERS
    <algorithm> <array> <charconv> <cmath> <cstdint> <cstring> <filesystem> <functional> <map>
    <memory> <optional> <set> <span> <string> <string_view> <unordered_map> <utility> <vector>)

function(conclave_precompile target)
  # GCC 13 does not take at -O1 what it precompiled at -O3.
  if(NOT CONCLAVE_PRECOMPILE OR NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU"
     OR CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    return()
  endif()
  target_precompile_headers(${target} PRIVATE ${ARGN})
  # ccache needs it to see which precompiled header a file was compiled with.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
endfunction()

# conclave_precompile_as(<target> <other>): the headers that are precompiled for the other target, which
# is compiled with the same options.
function(conclave_precompile_as target other)
  get_target_property(headers ${other} PRECOMPILE_HEADERS)
  if(headers)
    target_precompile_headers(${target} REUSE_FROM ${other})
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
  endif()
endfunction()
