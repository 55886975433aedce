# torchoffload_add_module(NAME [TESTING]): the extension module NAME from csrc/.
# core/, system/, storage/, device/codec/ and engine/ are compiled without torch's headers in reach, so an include that
# does not belong there fails.
# TESTING compiles the same sources with TORCHOFFLOAD_TESTING, plus csrc/testing (the simulated device, the log of seam calls) and tests/csrc.
# Which kinds of backend there are is decided here alone, by which sources are linked: each registers itself.

function(torchoffload_add_module name)
  cmake_parse_arguments(ARG "TESTING" "" "" ${ARGN})
  set(csrc "${PROJECT_SOURCE_DIR}/csrc")
  file(GLOB base_sources CONFIGURE_DEPENDS "${csrc}/core/*.cpp" "${csrc}/core/planning/*.cpp" "${csrc}/system/*.cpp"
       "${csrc}/storage/*.cpp" "${csrc}/device/codec/*.cpp" "${csrc}/engine/*.cpp")
  file(GLOB torch_sources CONFIGURE_DEPENDS "${csrc}/device/*.cpp" "${csrc}/autograd/*.cpp")
  file(GLOB test_sources CONFIGURE_DEPENDS "${csrc}/testing/*.cpp" "${PROJECT_SOURCE_DIR}/tests/csrc/*.cpp")

  if(NOT TORCH_CUDA_VERSION)
    list(FILTER torch_sources EXCLUDE REGEX "/cuda_[^/]*$")
  endif()
  if(ARG_TESTING)
    list(APPEND torch_sources ${test_sources})
  endif()

  add_library(${name}_base OBJECT ${base_sources})
  target_include_directories(${name}_base PRIVATE "${csrc}" ${Python_INCLUDE_DIRS})
  target_compile_definitions(${name}_base PRIVATE _GLIBCXX_USE_CXX11_ABI=${TORCH_CXX11_ABI})

  Python_add_library(${name} MODULE WITH_SOABI ${torch_sources})
  target_include_directories(${name} PRIVATE "${csrc}")
  target_compile_definitions(${name} PRIVATE TORCHOFFLOAD_MODULE_NAME=${name})
  # The libstdc++ that torch uses, by name, also where the compiler is set up to link its own statically: two of them in
  # one process share some of the names behind std::locale, and printing a number crashes.
  target_link_libraries(${name} PRIVATE ${name}_base TargetTorch::torch Threads::Threads -l:libstdc++.so.6)
  if(TORCH_CUDA_VERSION)
    target_link_libraries(${name} PRIVATE TargetTorch::cuda ${CMAKE_DL_LIBS})
  endif()
  if(TORCHOFFLOAD_OUTPUT_DIR)
    set_target_properties(${name} PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${TORCHOFFLOAD_OUTPUT_DIR}")
  endif()

  foreach(target IN ITEMS ${name}_base ${name})
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
  endforeach()
endfunction()

# torchoffload_add_cuda_check(): the target cuda_check compiles, on a CPU torch, what only a CUDA torch would compile:
# the CUDA backend. No other source asks which torch it is compiled for. Nothing is linked.
function(torchoffload_add_cuda_check)
  if(NOT TARGET TargetTorch::cuda_check)
    return()
  endif()
  file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/device/cuda_*.cpp")
  add_library(cuda_check OBJECT EXCLUDE_FROM_ALL ${sources})
  target_include_directories(cuda_check PRIVATE "${PROJECT_SOURCE_DIR}/csrc")
  target_compile_definitions(cuda_check PRIVATE TORCHOFFLOAD_MODULE_NAME=_C)
  target_compile_options(cuda_check PRIVATE -Wall -Wextra)
  target_link_libraries(cuda_check PRIVATE TargetTorch::torch TargetTorch::cuda_check Python::Module)
endfunction()
