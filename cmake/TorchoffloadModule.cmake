# The sources in their groups, and torchoffload_add_module(NAME [TESTING]): the extension module NAME for one torch.
# core/, system/, storage/ and engine/ are compiled without torch's headers in reach, so an include that does not belong
# there fails.
# TESTING compiles the same sources with TORCHOFFLOAD_TESTING, plus csrc/testing (the simulated device, the log of seam
# calls) and tests/csrc.
# Which kinds of backend there are is decided by which sources are linked, and nowhere else: each registers itself.

set(_csrc "${PROJECT_SOURCE_DIR}/csrc")
file(GLOB TORCHOFFLOAD_BASE_SOURCES CONFIGURE_DEPENDS "${_csrc}/core/*.cpp" "${_csrc}/core/planning/*.cpp"
     "${_csrc}/system/*.cpp" "${_csrc}/storage/*.cpp" "${_csrc}/engine/*.cpp")
file(GLOB TORCHOFFLOAD_TORCH_SOURCES CONFIGURE_DEPENDS "${_csrc}/device/*.cpp" "${_csrc}/autograd/*.cpp")
file(GLOB TORCHOFFLOAD_CUDA_SOURCES CONFIGURE_DEPENDS "${_csrc}/device/cuda_*.cpp")
list(REMOVE_ITEM TORCHOFFLOAD_TORCH_SOURCES ${TORCHOFFLOAD_CUDA_SOURCES})
file(GLOB TORCHOFFLOAD_TEST_SOURCES CONFIGURE_DEPENDS "${_csrc}/testing/*.cpp" "${PROJECT_SOURCE_DIR}/tests/csrc/*.cpp")

# The libstdc++ that torch uses, by name, also where the compiler is set up to link its own statically: two of them in
# one process share some of the names behind std::locale, and printing a number crashes.
set(TORCHOFFLOAD_SYSTEM_LIBRARIES Threads::Threads -l:libstdc++.so.6)

# torchoffload_set_options(TARGET [TESTING]): what all our targets are compiled with.
function(torchoffload_set_options target)
  cmake_parse_arguments(ARG "TESTING" "" "" ${ARGN})
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/csrc")
  target_compile_options(${target} PRIVATE -Wall -Wextra)
  if(CMAKE_UNITY_BUILD)  # a source's own unnamed namespace is then that of an included file
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
  # The hooks are many small functions in several sources. Without link-time optimisation each save takes 7% more
  # instructions.
  if(TORCHOFFLOAD_LTO AND NOT ARG_TESTING)
    set_target_properties(${target} PROPERTIES INTERPROCEDURAL_OPTIMIZATION ON)
  endif()
  if(ARG_TESTING)
    target_compile_definitions(${target} PRIVATE TORCHOFFLOAD_TESTING)
    target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/tests/csrc")
  endif()
endfunction()

# torchoffload_add_base(TARGET CXX11_ABI [TESTING]): the objects of the floors that know no torch.
function(torchoffload_add_base target cxx11_abi)
  add_library(${target} OBJECT ${TORCHOFFLOAD_BASE_SOURCES})
  target_include_directories(${target} PRIVATE ${Python_INCLUDE_DIRS})
  target_compile_definitions(${target} PRIVATE _GLIBCXX_USE_CXX11_ABI=${cxx11_abi})
  torchoffload_set_options(${target} ${ARGN})
endfunction()

function(torchoffload_add_module name)
  cmake_parse_arguments(ARG "TESTING" "" "" ${ARGN})
  torchoffload_add_base(${name}_base "${TORCH_CXX11_ABI}" ${ARGN})

  Python_add_library(${name} MODULE WITH_SOABI ${TORCHOFFLOAD_TORCH_SOURCES})
  target_compile_definitions(${name} PRIVATE TORCHOFFLOAD_MODULE_NAME=${name})
  target_link_libraries(${name} PRIVATE ${name}_base TargetTorch::torch ${TORCHOFFLOAD_SYSTEM_LIBRARIES})
  if(TORCH_CUDA_VERSION)
    target_sources(${name} PRIVATE ${TORCHOFFLOAD_CUDA_SOURCES})
    target_link_libraries(${name} PRIVATE TargetTorch::cuda)
  endif()
  if(ARG_TESTING)
    target_sources(${name} PRIVATE ${TORCHOFFLOAD_TEST_SOURCES})
  endif()
  if(TORCHOFFLOAD_OUTPUT_DIR)
    set_target_properties(${name} PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${TORCHOFFLOAD_OUTPUT_DIR}")
  endif()
  torchoffload_set_options(${name} ${ARGN})
endfunction()

# torchoffload_add_cuda_objects(TARGET): compiles, against a CPU torch, what only a CUDA torch can run: the CUDA
# backend. No other source asks which torch it is compiled for. Nothing is linked.
function(torchoffload_add_cuda_objects target)
  add_library(${target} OBJECT EXCLUDE_FROM_ALL ${TORCHOFFLOAD_CUDA_SOURCES})
  target_compile_definitions(${target} PRIVATE TORCHOFFLOAD_MODULE_NAME=_C)
  target_link_libraries(${target} PRIVATE TargetTorch::torch TargetTorch::cuda_headers Python::Module)
  torchoffload_set_options(${target})
endfunction()
