#include "device/marked_memory.h"

#include <c10/util/flat_hash_map.h>
#include <pthread.h>

#include "system/mutex.h"

namespace torchoffload {

namespace {

struct Mark {
  uint64_t allocation = 0;
  c10::DeleterFnPtr deleter = nullptr;  // the memory's original one
};

class Marks {
 public:
  static Marks& instance() {
    static Marks* const leaked = [] {
      auto* const marks = new Marks;
      // A forked child frees memory too. There the lock must not be held by a thread that exists only in the parent.
      pthread_atfork([]() NO_THREAD_SAFETY_ANALYSIS { instance().mutex_.lock(); },
                     []() NO_THREAD_SAFETY_ANALYSIS { instance().mutex_.unlock(); },
                     []() NO_THREAD_SAFETY_ANALYSIS { instance().mutex_.unlock(); });
      return marks;
    }();
    return *leaked;
  }

  uint64_t add(void* context, c10::DeleterFnPtr deleter) {
    const MutexLock lock(mutex_);
    marks_[context] = {++count_, deleter};
    return count_;
  }

  uint64_t number_of(void* context) {
    const MutexLock lock(mutex_);
    const auto found = marks_.find(context);
    return found == marks_.end() ? 0 : found->second.allocation;
  }

  c10::DeleterFnPtr take(void* context) {
    const MutexLock lock(mutex_);
    const auto found = marks_.find(context);
    if (found == marks_.end()) return nullptr;
    const c10::DeleterFnPtr deleter = found->second.deleter;
    marks_.erase(found);
    return deleter;
  }

 private:
  Mutex mutex_;                                               // no memory is freed while it is held
  ska::flat_hash_map<void*, Mark> marks_ GUARDED_BY(mutex_);  // by the memory's context
  uint64_t count_ GUARDED_BY(mutex_) = 0;
};

void delete_marked(void* context) {
  if (const c10::DeleterFnPtr deleter = Marks::instance().take(context)) deleter(context);
}

}  // namespace

bool is_marked(c10::DeleterFnPtr deleter) { return deleter == &delete_marked; }

uint64_t mark_memory(c10::StorageImpl& storage, c10::DeleterFnPtr plain) {
  c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  void* const context = data.get_context();
  if (is_marked(data.get_deleter())) return Marks::instance().number_of(context);
  if (context == nullptr || plain == nullptr || data.get_deleter() != plain) return 0;
  const uint64_t allocation = Marks::instance().add(context, plain);
  if (data.compare_exchange_deleter(plain, &delete_marked)) return allocation;
  (void)Marks::instance().take(context);
  return 0;
}

}  // namespace torchoffload
