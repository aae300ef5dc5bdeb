# fmt's functions are compiled once, by us: its shared library would be one more dependency of the
# installed package, and Debian has no static one. Versions whose instances format_library.cc does
# not know are used header-only, which is a slower build.
#
# conclave_format: what files that use fmt link. conclave_format_headers and CONCLAVE_FORMAT_OBJECTS:
# the two halves of it, for the library itself, whose export must name neither.
add_library(conclave_format_headers INTERFACE)
if(fmt_VERSION VERSION_GREATER_EQUAL 9 AND fmt_VERSION VERSION_LESS 10)
  target_include_directories(
    conclave_format_headers SYSTEM
    INTERFACE $<TARGET_PROPERTY:fmt::fmt-header-only,INTERFACE_INCLUDE_DIRECTORIES>)
  add_library(conclave_format STATIC ${PROJECT_SOURCE_DIR}/src/core/format_library.cc)
  set_target_properties(
    conclave_format
    PROPERTIES CXX_EXTENSIONS OFF
               CXX_VISIBILITY_PRESET hidden
               VISIBILITY_INLINES_HIDDEN ON
               POSITION_INDEPENDENT_CODE ON)
  target_compile_features(conclave_format PUBLIC cxx_std_20)
  target_link_libraries(conclave_format PUBLIC conclave_format_headers)
  set(CONCLAVE_FORMAT_OBJECTS $<TARGET_OBJECTS:conclave_format>)
else()
  target_link_libraries(conclave_format_headers INTERFACE fmt::fmt-header-only)
  add_library(conclave_format ALIAS conclave_format_headers)
  set(CONCLAVE_FORMAT_OBJECTS)
endif()
