// file_io: the system calls of the disk tier, which complete in whole or return the reason of their failure.
// Ownership:     FileDescriptor closes its descriptor; the functions borrow.
// Thread safety: every function, any thread; the I/O is positioned, so no call depends on another.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/types.h"

namespace torchoffload {

// Every call that moves or reserves bytes of a spill file goes through here, so that the test build can make one fail,
// fall short or take its time. Replace them only while no I/O is in flight.
struct IoCalls {
  ssize_t (*pread)(int fd, void* buffer, size_t nbytes, off_t offset);
  ssize_t (*pwrite)(int fd, const void* buffer, size_t nbytes, off_t offset);
  int (*reserve)(int fd, off_t offset, off_t nbytes);                // as posix_fallocate: returns an errno value
  int (*punch_hole)(int fd, off_t offset, off_t nbytes);             // 0, or -1 with errno
  int (*write_back)(int fd, off_t offset, off_t nbytes, int flags);  // as sync_file_range: 0, or -1 with errno
};
extern const IoCalls kSystemCalls;
#ifdef TORCHOFFLOAD_TESTING
extern IoCalls io_calls;
#else
extern const IoCalls& io_calls;
#endif

enum class IoDirection : uint8_t { Out, In };  // memory to file, file to memory

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = kClosed) : fd_(fd) {}
  ~FileDescriptor();
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, kClosed)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  bool is_open() const { return fd_ != kClosed; }
  int get() const { return fd_; }

 private:
  static constexpr int kClosed = -1;
  int fd_;
};

// The outcome of a transfer. Complete: all bytes done. Otherwise `error` is an errno value, or 0 at the end of the
// file.
struct IoResult {
  uint64_t done_bytes = 0;
  int error = 0;
  bool complete = false;

  std::string reason() const;  // why it is not complete
};

// Moves all of `span`, over interruptions and short transfers. Memory is only read when the direction is Out.
IoResult move_fully(int fd, IoDirection direction, std::byte* memory, Span span);

// Start writing dirty pages to the disk, and return at once. Best effort.
void start_write_back(int fd, Span span);

// Blocks until the pages of `span` are on the disk, then drops them from memory. Returns an errno value, or 0.
int write_back_and_drop(int fd, Span span);

// Drops clean pages from memory. Best effort.
void drop_pages(int fd, Span span);

// A path for a message: in quotes, with bytes that are no printable UTF-8 as \xNN.
std::string quoted(const std::string& path);

// No file could be made. what() has the directory and errno's text.
struct OpenError : std::runtime_error {
  OpenError(const std::string& directory, int error);
  // May it be made later, although nobody changes the directory or its rights? So it is if descriptors, memory or room
  // on the disk ran short, and if the disk failed.
  bool may_pass;
};

// An unlinked file in `directory` that only this process can reach, mode 0600, closed on exec. Throws OpenError.
FileDescriptor open_unlinked(const std::string& directory);

// The same file once more, for I/O past the page cache. Not open if the file system, or a missing /proc, refuses.
FileDescriptor reopen_direct(const FileDescriptor& file);

}  // namespace torchoffload
