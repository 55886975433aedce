#include "device/places.h"

#include <unistd.h>

#include <algorithm>

#include "device/backends.h"
#include "system/host_wait.h"

namespace torchoffload {

namespace {

constexpr size_t kPlacesOpen = 2;         // idle places that keep files and threads
constexpr size_t kPlacesRemembered = 16;  // idle places that keep their learned facts

}  // namespace

bool DiskPlace::is_of(const DiskKey& key) const {
  return memory_ == key.memory && writes_at_once_ == key.writes_at_once &&
         std::ranges::equal(directories_, key.directories) && !fork_guard_.inherited();
}

bool DiskPlace::has_directories() const {
  return std::ranges::all_of(directories_, [](const auto& path) { return access(path.c_str(), F_OK) == 0; });
}

DiskPlace& DiskPlaces::turn_to(const DiskKey& key, const BackendUsers& users,
                               const std::function<std::shared_ptr<DiskPlace>()>& make) {
  const auto is_it = [&](const auto& place) { return place->is_of(key); };
  if (!places_.empty() && is_it(places_.front())) return *places_.front();
  const auto found = std::ranges::find_if(places_, is_it);
  if (found == places_.end()) {
    places_.insert(places_.begin(), make());
  } else {
    std::rotate(places_.begin(), found, found + 1);
  }
  DiskPlace& place = *places_.front();
  place.was_trimmed_ = false;
  tidy(users);
  return place;
}

// A place with live tapes or transfers under way is left as it is, and so is the latest one, which is being turned to
// right now. While the calls that block are made, another thread may turn to further places.
void DiskPlaces::tidy(const BackendUsers& users) {
  std::vector<std::shared_ptr<DiskPlace>> left, dropped;
  size_t idle_count = 0;
  for (auto place = places_.begin() + 1; place != places_.end();) {
    DiskPlace& each = **place;
    if (users.have_tapes(each) || !each.is_idle()) {
      ++place;
      continue;
    }
    const bool is_there = each.has_directories();
    idle_count += is_there ? 1 : 0;
    const bool is_open = is_there && idle_count < kPlacesOpen;
    const bool is_remembered = (is_there && idle_count < kPlacesRemembered) || users.know(each);
    if (!is_open && !std::exchange(each.was_trimmed_, true)) left.push_back(*place);
    if (!is_remembered) dropped.push_back(*place);
    place = is_remembered ? place + 1 : places_.erase(place);
  }
  if (left.empty() && dropped.empty()) return;  // as for a program that takes turns
  for (const auto& place : dropped) users.drop(place);
  users.without_gil([&] {
    try {
      for (const auto& place : left) (void)place->trim();
    } catch (const WaitAbandoned&) {  // by the user: Python handles that once it runs, and trim() releases the rest
    }
    left.clear();
    dropped.clear();
  });
}

uint64_t DiskPlaces::trim(const BackendUsers& users) {
  uint64_t released_bytes = 0;
  std::vector<std::shared_ptr<DiskPlace>> all = places_;
  users.without_gil([&] {
    for (const auto& place : all) released_bytes += place->trim();
    all.clear();  // one that was dropped meanwhile ends here
  });
  return released_bytes;
}

}  // namespace torchoffload
