#include "system/file_io.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>

namespace torchoffload {
namespace {

constexpr uint64_t kMaxCallBytes = uint64_t{1} << 30;  // Linux moves at most 2 GiB less a page in one call

int punch_hole(int fd, off_t offset, off_t nbytes) {
  return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, nbytes);
}

int write_back(int fd, off_t offset, off_t nbytes, int flags) {
  return sync_file_range(fd, offset, nbytes, static_cast<unsigned>(flags));
}

// How many bytes the first character has; 0 if it is none in UTF-8, or not printable.
size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t place) { return static_cast<unsigned char>(text[place]); };
  if (byte(0) < 0x80) return byte(0) >= 0x20 && byte(0) != 0x7f ? 1 : 0;
  const size_t length = byte(0) >= 0xf0 ? 4 : byte(0) >= 0xe0 ? 3 : 2;
  if (byte(0) < 0xc2 || byte(0) > 0xf4 || text.size() < length) return 0;
  for (size_t place = 1; place < length; ++place) {
    if ((byte(place) & 0xc0) != 0x80) return 0;
  }
  const bool is_overlong = (byte(0) == 0xe0 && byte(1) < 0xa0) || (byte(0) == 0xf0 && byte(1) < 0x90);
  const bool is_beyond = (byte(0) == 0xed && byte(1) >= 0xa0) || (byte(0) == 0xf4 && byte(1) >= 0x90);
  return is_overlong || is_beyond ? 0 : length;
}

// `call(position, nbytes)` moves bytes at `position` of the file, which is `position - span.begin` of the buffer.
template <typename Function>
IoResult transfer_fully(Span span, Function call) {
  IoResult result;
  while (result.done_bytes < span.nbytes()) {
    const uint64_t rest_bytes = span.nbytes() - result.done_bytes;
    const uint64_t call_bytes = rest_bytes < kMaxCallBytes ? rest_bytes : kMaxCallBytes;
    const ssize_t moved = call(result.done_bytes, call_bytes, static_cast<off_t>(span.begin + result.done_bytes));
    if (moved > 0) {
      result.done_bytes += static_cast<uint64_t>(moved);
    } else if (moved == 0) {
      return result;
    } else if (errno != EINTR) {
      result.error = errno;
      return result;
    }
  }
  result.complete = true;
  return result;
}

}  // namespace

const IoCalls kSystemCalls{::pread, ::pwrite, ::posix_fallocate, punch_hole, write_back};
#ifdef TORCHOFFLOAD_TESTING
IoCalls io_calls{::pread, ::pwrite, ::posix_fallocate, punch_hole, write_back};
#else
const IoCalls& io_calls = kSystemCalls;
#endif

FileDescriptor::~FileDescriptor() {
  if (is_open()) close(fd_);
}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

std::string IoResult::reason() const { return error == 0 ? "end of file" : std::strerror(error); }

IoResult move_fully(int fd, IoDirection direction, std::byte* memory, Span span) {
  return transfer_fully(span, [=](uint64_t done_bytes, uint64_t nbytes, off_t offset) {
    return direction == IoDirection::Out ? io_calls.pwrite(fd, memory + done_bytes, nbytes, offset)
                                         : io_calls.pread(fd, memory + done_bytes, nbytes, offset);
  });
}

void start_write_back(int fd, Span span) {
  io_calls.write_back(fd, static_cast<off_t>(span.begin), static_cast<off_t>(span.nbytes()), SYNC_FILE_RANGE_WRITE);
}

int write_back_and_drop(int fd, Span span) {
  constexpr int kAllOfIt = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  int error = 0;
  if (io_calls.write_back(fd, static_cast<off_t>(span.begin), static_cast<off_t>(span.nbytes()), kAllOfIt) != 0) {
    error = errno;
    const bool is_unsupported = error == ENOSYS || error == EINVAL || error == ESPIPE || error == EOPNOTSUPP;
    if (is_unsupported) error = fdatasync(fd) == 0 ? 0 : errno;
  }
  drop_pages(fd, span);
  return error;
}

void drop_pages(int fd, Span span) {
  posix_fadvise(fd, static_cast<off_t>(span.begin), static_cast<off_t>(span.nbytes()), POSIX_FADV_DONTNEED);
}

std::string quoted(const std::string& path) {
  std::string told = "'";
  for (size_t place = 0; place < path.size();) {
    const size_t length = utf8_length(std::string_view(path).substr(place));
    if (length > 0) {
      told.append(path, place, length);
    } else {
      constexpr char kDigits[] = "0123456789abcdef";
      const auto byte = static_cast<unsigned char>(path[place]);
      told += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    }
    place += std::max<size_t>(length, 1);
  }
  return told + "'";
}

OpenError::OpenError(const std::string& directory, int error)
    : std::runtime_error("cannot make a spill file in " + quoted(directory) + ": " + std::strerror(error)) {
  constexpr std::array kLasting{ENOENT, ENOTDIR, EACCES, EPERM, EROFS, ELOOP, ENAMETOOLONG, EOPNOTSUPP};
  may_pass = std::ranges::find(kLasting, error) == kLasting.end();
}

FileDescriptor open_unlinked(const std::string& directory) {
  FileDescriptor file(open(directory.c_str(), O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600));
  if (!file.is_open()) {
    // Not every file system has O_TMPFILE.
    std::string path = directory + "/torchoffload-XXXXXX";
    file = FileDescriptor(mkostemp(path.data(), O_CLOEXEC));
    if (!file.is_open()) throw OpenError(directory, errno);
    unlink(path.c_str());
  }
  // No readahead: it would bring neighbours' bytes back into memory.
  posix_fadvise(file.get(), 0, 0, POSIX_FADV_RANDOM);
  return file;
}

FileDescriptor reopen_direct(const FileDescriptor& file) {
  const std::string path = "/proc/self/fd/" + std::to_string(file.get());
  return FileDescriptor(open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC));
}

}  // namespace torchoffload
