// What a wheel needs of the C library and of libstdc++, in the versions that older systems have as well: glibc 2.28 and
// the libstdc++ of gcc 8, which is what manylinux_2_28 allows. Compiled into the modules of wheels alone, and without
// link-time optimisation, which loses track of .symver.
//
// Note [Older versions of symbols]
// A library gives a function a new version when it changes it, or moves it to another library, and keeps the old one
// for programs that were linked before. The linker takes the newest, which an older system lacks. So our references to
// these functions end here, at hidden functions of the same names, and those ask for the old version. What a function
// does, and what it takes, has to be the same in both; a name that is added here has to be looked at for that.
// Members of the std namespace are called by the names that the linker knows them by, with `this` as first argument.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstddef>
#include <ios>
#include <new>
#include <string>

#define HIDDEN __attribute__((visibility("hidden")))

// OLDER(VERSION, RESULT, NAME, PARAMETERS, ARGUMENTS): NAME, as a call of NAME@VERSION.
#define OLDER(version, result, name, parameters, arguments) \
  result older_##name parameters asm("older_" #name);       \
  asm(".symver older_" #name ", " #name "@" version);       \
  HIDDEN result newer_##name parameters asm(#name);         \
  result newer_##name parameters { return older_##name arguments; }

namespace torchoffload::older {

#if defined(__x86_64__)  // other processors have other versions

// Part of libc itself since glibc 2.34, pthread_sigmask since 2.32.
OLDER("GLIBC_2.2.5", int, pthread_create,
      (pthread_t * thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument),
      (thread, attributes, run, argument))
OLDER("GLIBC_2.2.5", int, pthread_join, (pthread_t thread, void** result), (thread, result))
OLDER("GLIBC_2.2.5", int, pthread_mutex_trylock, (pthread_mutex_t * mutex), (mutex))
OLDER("GLIBC_2.2.5", int, pthread_once, (pthread_once_t * control, void (*run)()), (control, run))
OLDER("GLIBC_2.2.5", int, pthread_sigmask, (int how, const sigset_t* set, sigset_t* before), (how, set, before))
OLDER("GLIBC_2.2.5", int, pthread_attr_setstacksize, (pthread_attr_t * attributes, size_t nbytes), (attributes, nbytes))
OLDER("GLIBC_2.3.4", int, pthread_setaffinity_np, (pthread_t thread, size_t nbytes, const cpu_set_t* cpus),
      (thread, nbytes, cpus))
OLDER("GLIBC_2.12", int, pthread_setname_np, (pthread_t thread, const char* name), (thread, name))

// std::condition_variable::wait(std::unique_lock<std::mutex>&), which became noexcept in gcc 12.
OLDER("GLIBCXX_3.4.11", void, _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, (void* self, void* lock),
      (self, lock))

#endif

// Since glibc 2.30.
HIDDEN pid_t thread_id() asm("gettid");
pid_t thread_id() { return static_cast<pid_t>(syscall(SYS_gettid)); }

// Since glibc 2.30: what std::condition_variable waits by until a time of std::chrono::steady_clock. Waits by the clock
// that older systems know; where the system's time is set meanwhile, a wait ends early or late, as it did before.
HIDDEN int wait_by_clock(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                         const timespec* time) asm("pthread_cond_clockwait");
int wait_by_clock(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* time) {
  constexpr long nanoseconds = 1'000'000'000;
  timespec now{};
  timespec until{};
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += time->tv_sec - now.tv_sec;
  until.tv_nsec += time->tv_nsec - now.tv_nsec;
  if (until.tv_nsec < 0) {
    until.tv_nsec += nanoseconds;
    --until.tv_sec;
  } else if (until.tv_nsec >= nanoseconds) {
    until.tv_nsec -= nanoseconds;
    ++until.tv_sec;
  }
  return pthread_cond_timedwait(condition, mutex, &until);
}

// std::exception_ptr is one pointer. Since gcc 11 its copies are inline and call these two; before, they were made by
// its constructor and ended by its destructor, which libstdc++ still has.
void copy_exception(void** self, void* const* from) asm("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void destroy_exception(void** self) asm("_ZNSt15__exception_ptr13exception_ptrD1Ev");
HIDDEN void add_reference(void** self) asm("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
HIDDEN void release_reference(void** self) asm("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void add_reference(void** self) {
  void* never_destroyed;
  copy_exception(&never_destroyed, self);
}
void release_reference(void** self) {
  destroy_exception(self);
  *self = nullptr;
}

// std::ostringstream(), since gcc 9, and str() of an lvalue and of an rvalue, which since gcc 11 are functions of their
// own. The latter leaves nothing behind.
void open_string_stream(void* self, std::ios_base::openmode mode) asm(
    "_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1ESt13_Ios_Openmode");
HIDDEN void open_string_stream(void* self) asm("_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void open_string_stream(void* self) { open_string_stream(self, std::ios_base::out); }
std::string string_of(const void* self) asm("_ZNKSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
HIDDEN std::string string_of_lvalue(const void* self) asm(
    "_ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
std::string string_of_lvalue(const void* self) { return string_of(self); }
void set_string(void* self, const std::string& text) asm(
    "_ZNSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strERKNS_12basic_stringIcS2_S3_EE");
HIDDEN std::string string_of_rvalue(void* self) asm("_ZNOSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
std::string string_of_rvalue(void* self) {
  std::string text = string_of(self);
  set_string(self, std::string());
  return text;
}

// What `new` of an array throws when its size is none, since gcc 11.
[[noreturn]] HIDDEN void throw_bad_array_new_length() asm("_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// What libstdc++ asks, since glibc 2.32, to leave out atomic operations while a process has one thread. This one always
// answers that there may be several.
HIDDEN extern char single_threaded asm("__libc_single_threaded");
char single_threaded = 0;

}  // namespace torchoffload::older
