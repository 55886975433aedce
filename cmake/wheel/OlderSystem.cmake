# The target older_system: what lets a wheel load on systems that are older than the one that it is built on. The
# sources need no older system for that. tools/build_wheels.py has auditwheel check what came of it.

add_library(older_system OBJECT "${CMAKE_CURRENT_LIST_DIR}/older_system.cpp")
target_compile_options(older_system PRIVATE -Wall -Wextra -ffunction-sections)

# libstdc++ has std::pmr since gcc 9. So that part of it, and no other, comes with us: one object file of the static
# library, in a library of its own. Its names stay ours, and what of it is not used is left out, with all that it would
# ask for. It is among the options because those come first, and of two that define a name the linker takes the first.
set(_pmr "${CMAKE_CURRENT_BINARY_DIR}/libmemory_resource.a")
execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -print-file-name=libstdc++.a OUTPUT_VARIABLE _stdcxx
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${CMAKE_AR}" x "${_stdcxx}" memory_resource.o
                WORKING_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}" COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${CMAKE_AR}" rcs "${_pmr}" "${CMAKE_CURRENT_BINARY_DIR}/memory_resource.o"
                COMMAND_ERROR_IS_FATAL ANY)
target_link_options(older_system INTERFACE -Wl,--whole-archive "${_pmr}" -Wl,--no-whole-archive
                    -Wl,--exclude-libs,libmemory_resource.a -Wl,--gc-sections)
