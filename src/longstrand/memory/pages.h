// Memory for large blocks, a page at a time.
//
// What is given back is kept, and given out again for any size that it has room for. It goes to the system where new pages would
// make it more than has ever lived at once, and a little. So a process holds what its largest moment needs, and in
// the steady course of a training step a block's pages were there before: a new page costs a fault and its zeroing.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <utility>

// Free ranges of addresses; neighbours are one range.
class Ranges {
 public:
  size_t bytes() const { return bytes_; }

  void add(char* at, size_t size) {
    bytes_ += size;
    auto next = by_place_.lower_bound(at);
    if (next != by_place_.end() && at + size == next->first) {
      size += next->second;
      next = forget(next);
    }
    if (next != by_place_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == at) {
        at = before->first;
        size += before->second;
        forget(before);
      }
    }
    keep(at, size);
  }

  // The start of the smallest range that is large enough; null: none is.
  char* take(size_t size) {
    auto found = by_size_.lower_bound({size, nullptr});
    return found == by_size_.end() ? nullptr : cut(found->second, size);
  }

  // The start of the largest range, or the whole of it where it is smaller than that; there is one.
  std::pair<char*, size_t> take_largest(size_t most) {
    auto [size, at] = *by_size_.rbegin();
    size = std::min(size, most);
    return {cut(at, size), size};
  }

 private:
  using ByPlace = std::map<char*, size_t>;

  void keep(char* at, size_t size) {
    by_place_[at] = size;
    by_size_.insert({size, at});
  }

  ByPlace::iterator forget(ByPlace::iterator range) {
    by_size_.erase({range->second, range->first});
    return by_place_.erase(range);
  }

  char* cut(char* at, size_t size) {
    auto range = by_place_.find(at);
    const size_t rest = range->second - size;
    forget(range);
    if (rest > 0) keep(at + size, rest);
    bytes_ -= size;
    return at;
  }

  ByPlace by_place_;
  std::set<std::pair<size_t, char*>> by_size_;
  size_t bytes_ = 0;
};

class Pages {
 public:
  static constexpr size_t kPage = 4096;
  static constexpr double kMore = 1.04;  // of the most that has lived; less costs time, more is memory for nothing

  static size_t whole(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

  // Addresses alone, no memory; false: the system gives none.
  bool reserve(size_t bytes) {
    void* at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return false;
    empty_.add(static_cast<char*>(at), bytes);
    return true;
  }

  // A block of whole pages; null: the system gives no more memory, or no addresses are left.
  char* take(size_t bytes) {
    char* at = kept_.take(bytes);
    if (at == nullptr) {
      const size_t peak = std::max(peak_, living_ + bytes);
      release_to(static_cast<size_t>(kMore * peak) - living_ - bytes);
      at = take_empty(bytes);
      if (at == nullptr) return nullptr;
    }
    living_ += bytes;
    peak_ = std::max(peak_, living_);
    return at;
  }

  void give_back(char* at, size_t bytes) {
    living_ -= bytes;
    kept_.add(at, bytes);
  }

  // Nothing free is kept, and what has lived at once counts anew.
  void begin() {
    release_to(0);
    peak_ = living_;
  }

 private:
  // Asks the system for the memory, which refuses what it could never give.
  char* take_empty(size_t bytes) {
    char* at = empty_.take(bytes);
    if (at != nullptr && mprotect(at, bytes, PROT_READ | PROT_WRITE) != 0) {
      empty_.add(at, bytes);
      at = nullptr;
    }
    return at;
  }

  void release_to(size_t allowed) {
    while (kept_.bytes() > allowed) {
      auto [at, bytes] = kept_.take_largest(whole(kept_.bytes() - allowed));
      madvise(at, bytes, MADV_DONTNEED);
      empty_.add(at, bytes);
    }
  }

  Ranges kept_, empty_;  // with pages that were used, and without
  size_t living_ = 0, peak_ = 0;
};
