// torch's CPU allocator, with large blocks in pages of our own; counts the bytes given out, and the most of them at once.
//
// It stands in front of torch's own. What was allocated before it stands there is not counted, and what it has given out
// goes back through it, so that it stays for the life of the process.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <pthread.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "pages.h"

namespace {

constexpr size_t kLarge = 64 << 10;        // smaller ones would waste too much of their last page
constexpr size_t kAddresses = 1ULL << 40;  // more than a machine has memory

int64_t live = 0, most = 0;

struct Block {
  size_t bytes = 0;
  size_t in_pages = 0;  // 0: it is torch's own
};

// What was given out before, or is freed past this allocator, does no harm: it is not in here. torch asks that what
// frees a block be given the block itself. None is ever destroyed: tensors are freed until the very end of the process.
std::mutex& guard = *new std::mutex;
std::unordered_map<void*, Block>& blocks = *new std::unordered_map<void*, Block>;
Pages& pages = *new Pages;

c10::Allocator* behind() {
  static c10::Allocator* const torchs = c10::GetCPUAllocator();
  return torchs;
}

void note(void* at, Block block) {
  Block& known = blocks[at];
  live += static_cast<int64_t>(block.bytes) - static_cast<int64_t>(known.bytes);
  known = block;
  if (live > most) most = live;
}

void lock() { guard.lock(); }
void unlock() { guard.unlock(); }

void* in_pages(size_t bytes) {
  if (bytes < kLarge) return nullptr;
  std::lock_guard<std::mutex> lock(guard);
  const size_t whole = Pages::whole(bytes);
  char* at = pages.take(whole);
  if (at != nullptr) note(at, {bytes, whole});
  return at;
}

void give_back(void* at) {
  {
    std::lock_guard<std::mutex> lock(guard);
    auto found = blocks.find(at);
    if (found != blocks.end()) {
      const Block block = found->second;
      live -= static_cast<int64_t>(block.bytes);
      blocks.erase(found);
      if (block.in_pages > 0) return pages.give_back(static_cast<char*>(at), block.in_pages);
    }
  }
  behind()->raw_deleter()(at);
}

struct Counter final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (void* at = in_pages(bytes)) return {at, at, &give_back, c10::Device(c10::kCPU)};
    c10::DataPtr memory = behind()->allocate(bytes);
    const c10::Device device = memory.device();
    void* at = memory.release_context();
    if (at == nullptr) return {nullptr, nullptr, &give_back, device};
    std::lock_guard<std::mutex> lock(guard);
    note(at, {bytes, 0});
    return {at, at, &give_back, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

extern "C" {

// Whether large blocks lie in pages of our own: there are addresses for them.
bool has_pages() {
  static const bool has = pages.reserve(kAddresses);
  return has;
}

// Whether it counts from now on: not where torch's allocator has no one deleter to give blocks back to, nor where another
// allocator keeps its place before this one.
bool start_counting() {
  static Counter counter;
  if (behind()->raw_deleter() == nullptr) return false;
  static const int held_in_forks = pthread_atfork(lock, unlock, unlock);
  static_cast<void>(held_in_forks);
  has_pages();
  c10::SetCPUAllocator(&counter, 1);
  return c10::GetCPUAllocator() == &counter;
}

int64_t live_bytes() {
  std::lock_guard<std::mutex> lock(guard);
  return live;
}

// The most since the last call; free pages go back to the system.
int64_t take_most() {
  std::lock_guard<std::mutex> lock(guard);
  const int64_t found = most;
  most = live;
  pages.begin();
  return found;
}
}
