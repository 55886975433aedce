// thread_annotations.h: which lock guards each field, in a form that clang checks (-Wthread-safety, by `make lint`).
// Ownership:     none: it has macros alone.
// Thread safety: it says which, for all other files.
// Cost:          none: other compilers see nothing, and clang generates the same code.
//
//   GUARDED_BY(mutex)       the variable is read and written with this lock held
//   REQUIRES(mutex)         the function is called with this lock held
//   EXCLUDES(mutex)         the function is called without it: it takes the lock itself, or blocks
//   ACQUIRE, RELEASE        the function takes the lock, or gives it back
//   NO_THREAD_SAFETY_ANALYSIS   the function's body is not checked; a comment says why
//
// A lambda is checked as a function of its own: `[&]() REQUIRES(mutex_) { ... }` if it is called with the lock held.
// Python's lock is such a lock as well; see system/gil.h.
#pragma once

#if defined(__clang__)
#define TORCHOFFLOAD_ANNOTATE(annotation) __attribute__((annotation))
#else
#define TORCHOFFLOAD_ANNOTATE(annotation)
#endif

#define CAPABILITY(name) TORCHOFFLOAD_ANNOTATE(capability(name))
#define SCOPED_CAPABILITY TORCHOFFLOAD_ANNOTATE(scoped_lockable)
#define GUARDED_BY(...) TORCHOFFLOAD_ANNOTATE(guarded_by(__VA_ARGS__))
#define REQUIRES(...) TORCHOFFLOAD_ANNOTATE(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) TORCHOFFLOAD_ANNOTATE(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) TORCHOFFLOAD_ANNOTATE(acquire_capability(__VA_ARGS__))
#define RELEASE(...) TORCHOFFLOAD_ANNOTATE(release_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) TORCHOFFLOAD_ANNOTATE(try_acquire_capability(__VA_ARGS__))
#define ASSERT_CAPABILITY(...) TORCHOFFLOAD_ANNOTATE(assert_capability(__VA_ARGS__))
#define RETURN_CAPABILITY(...) TORCHOFFLOAD_ANNOTATE(lock_returned(__VA_ARGS__))
#define NO_THREAD_SAFETY_ANALYSIS TORCHOFFLOAD_ANNOTATE(no_thread_safety_analysis)
