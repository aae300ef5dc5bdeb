# Uses ccache where it is found and the caller has not chosen a launcher.
if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(CONCLAVE_CCACHE ccache)
  mark_as_advanced(CONCLAVE_CCACHE)
  if(CONCLAVE_CCACHE)
    # Without these it takes no file that uses a precompiled header.
    set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
                                    CCACHE_SLOPPINESS=pch_defines,time_macros ${CONCLAVE_CCACHE})
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CONCLAVE_CCACHE})
  endif()
endif()
